"""What one step came to, as plain data that another process could send."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...common.errors import LaminaError
from .scheduler_output import Ints, StepLogprobs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunnerOutput:
    """The tokens that a step sampled, and what is known besides of its rows.

    Where `error` is set the whole step failed: nothing else means anything, and it counts as never begun.
    """

    token_ids: NDArray[np.int32]  # [n] sampled ids, row after row in the plan's order
    num_sampled: Ints | None = None  # [num_rows] ids each row yielded; None: as many as the plan says
    num_drafted: Ints | None = None  # [num_rows] drafts of each row that were no fillers; None: no drafts
    num_proposed: Ints | None = None  # [num_rows] drafts that the step left for the next; None: no drafter
    # [num_rows * k] which these are, -1 in place of none; None where the device keeps them to itself
    draft_ids: NDArray[np.int32] | None = None
    logprobs: StepLogprobs | None = None  # as the plan wants them
    # By request id the tokens that come after its sample for certain, as its grammar leaves no other.
    forced: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # By request id the results of prompts that end with the step, as float32, the lowest byte first.
    pooled: Mapping[str, bytes] = field(default_factory=dict)
    failures: Mapping[str, LaminaError] = field(default_factory=dict)  # by request id: failed alone
    error: Exception | None = None


def failed_step(error: Exception) -> RunnerOutput:
    """The output of a step that failed as a whole."""
    return RunnerOutput(token_ids=np.zeros(0, np.int32), error=error)
