"""The passes in the order in which they run, one line and one reason each."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from ...common.errors import CompileError
from ..fingerprint import source_line
from .add_rms_norm import ADD_RMS_NORM, RMS_NORM
from .canonicalise import CANONICALISE
from .graph import Pass, PassReport, is_mutating
from .lower import LOWER
from .residual_barrier import RESIDUAL_BARRIER
from .silu_and_mul import SILU_AND_MUL

PIPELINE: tuple[Pass, ...] = (
    CANONICALISE,  # first, so that the others meet one spelling
    RESIDUAL_BARRIER,  # before the norms, which look for the sum that it writes
    ADD_RMS_NORM,  # before rms_norm, which would take the norm and leave the sum
    RMS_NORM,  # the norms without a sum
    SILU_AND_MUL,  # meets nothing of the others
    LOWER,  # last: turns what was named into what its provider runs
)
PASS_NAMES: tuple[str, ...] = tuple(step.name for step in PIPELINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewritten:
    """A graph after the passes, with what each did."""

    graph: fx.Graph
    reports: tuple[PassReport, ...]


def select(names: Sequence[str] | None, numerics: str) -> tuple[Pass, ...]:
    """The passes to run; in exact mode the model's own ops stay opaque, so nothing is lowered."""
    chosen = PASS_NAMES if names is None else tuple(names)
    return tuple(
        step for step in PIPELINE if step.name in chosen and (numerics == "fast" or step is not LOWER)
    )


def rewrite(graph: fx.Graph, passes: Sequence[Pass]) -> Rewritten:
    """Run the passes one after another; the given graph stays as it is.

    Raises CompileError for what no piece may hold: a write, over which nothing could be moved or merged, and
    a tensor that is not an input, which no generated source could hold.
    """
    for node in graph.nodes:
        if is_mutating(node):
            raise CompileError(
                f"{node.name} ({node.target}) writes into a tensor; between attention calls a model's "
                f"forward must only compute{source_line(node)}"
            )
        if node.op == "get_attr":
            raise CompileError(
                f"the tensor {node.target} is made by the model's own code; a model must take every tensor "
                f"from its weights{''.join(source_line(user) for user in node.users)}"
            )
    reports = []
    for step in passes:
        graph, report = step.run(graph)
        graph.lint()
        reports.append(report)
    return Rewritten(graph=graph, reports=tuple(reports))


def describe(passes: Sequence[Pass]) -> tuple[str, ...]:
    """name@version of each, as cache keys hold them."""
    return tuple(f"{step.name}@{step.version}" for step in passes)
