"""What proves a pass: random programs with its sites and their look-alikes, and a check for each claim."""

try:
    import hypothesis as hypothesis
except ImportError as error:
    raise ImportError("lamina.testing draws programs by Hypothesis; pip install hypothesis") from error

from .checks import (
    apply,
    assert_same_bits,
    check_idempotent,
    check_memory,
    check_report,
    check_values,
    check_values_of_ops,
    check_well_formed,
)
from .fragments import State, Step
from .random_programs import BODIES, Program, Traced, programs, results_of, run, trace

__all__ = [
    "BODIES",
    "Program",
    "State",
    "Step",
    "Traced",
    "apply",
    "assert_same_bits",
    "check_idempotent",
    "check_memory",
    "check_report",
    "check_values",
    "check_values_of_ops",
    "check_well_formed",
    "programs",
    "results_of",
    "run",
    "trace",
]
