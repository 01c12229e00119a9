"""The passes in the order in which they run, one line and one reason each."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from ...common.errors import CompileError
from ..config import Numerics
from ..fingerprint import source_line
from .add_rms_norm import ADD_RMS_NORM, RMS_NORM
from .add_rms_norm_linear import ADD_RMS_NORM_LINEAR
from .canonicalise import CANONICALISE
from .graph import Pass, PassReport, is_mutating
from .linear import LINEAR
from .lower import LOWER
from .residual_barrier import RESIDUAL_BARRIER
from .rotary_and_write import ROTARY_AND_WRITE
from .silu_and_mul import SILU_AND_MUL

PIPELINE: tuple[Pass, ...] = (
    ROTARY_AND_WRITE,  # of the whole model: in a piece the rotation and the write are apart
    CANONICALISE,  # first, so that the others meet one spelling
    RESIDUAL_BARRIER,  # before the norms, which look for the sum that it writes
    ADD_RMS_NORM,  # before rms_norm, which would take the norm and leave the sum
    RMS_NORM,  # the norms without a sum
    SILU_AND_MUL,  # meets nothing of the others
    LINEAR,  # after the barrier, which looks for products
    ADD_RMS_NORM_LINEAR,  # joins what the three before it have named
    LOWER,  # last: turns what was named into what its provider runs
)
PASS_NAMES: tuple[str, ...] = tuple(step.name for step in PIPELINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewritten:
    """A graph after the passes, with what each did."""

    graph: fx.Graph
    reports: tuple[PassReport, ...]


def select(names: Sequence[str] | None, numerics: Numerics) -> tuple[Pass, ...]:
    """The passes to run; in exact mode the model's own ops stay as they are, so none is lowered or joined."""
    chosen = PASS_NAMES if names is None else tuple(names)
    return tuple(step for step in PIPELINE if step.name in chosen and numerics in step.numerics)


def of_scope(passes: Sequence[Pass], scope: str) -> tuple[Pass, ...]:
    """Those over the whole "model", or those over a "piece"."""
    return tuple(step for step in passes if step.scope == scope)


def rewrite(graph: fx.Graph, passes: Sequence[Pass]) -> Rewritten:
    """Run the passes over a piece one after another; the given graph stays as it is.

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
    return _run(graph, of_scope(passes, "piece"))


def rewrite_model(graph: fx.Graph, passes: Sequence[Pass]) -> Rewritten:
    """Run the passes over the whole captured graph one after another; the given graph stays as it is."""
    return _run(graph, of_scope(passes, "model"))


def _run(graph: fx.Graph, passes: Sequence[Pass]) -> Rewritten:
    reports = []
    for step in passes:
        graph, report = step.run(graph)
        graph.lint()
        reports.append(report)
    return Rewritten(graph=graph, reports=tuple(reports))


def describe(passes: Sequence[Pass]) -> tuple[str, ...]:
    """name@version of each, as cache keys hold them."""
    return tuple(f"{step.name}@{step.version}" for step in passes)
