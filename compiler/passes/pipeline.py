"""The passes in the order in which they run, one line and one reason each."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from ...common.errors import CompileError, ConfigError, LaminaError
from ..capture.describe import CannotDescribe
from ..capture.describe import describe as describe_value
from ..capture.fingerprint import source_line
from ..numerics import Numerics
from .add_rms_norm import ADD_RMS_NORM, RMS_NORM
from .add_rms_norm_linear import ADD_RMS_NORM_LINEAR
from .all_reduce_add_rms_norm import ALL_REDUCE_ADD_RMS_NORM
from .batch_invariant import BATCH_INVARIANT
from .canonicalise import CANONICALISE
from .gated_w4a16 import GATED_W4A16
from .graph import Pass, PassReport, is_mutating
from .linear import LINEAR
from .linear_lora import LINEAR_LORA
from .linear_silu_and_mul import LINEAR_SILU_AND_MUL
from .lower import LOWER
from .mlp_w8a8 import MLP_W8A8
from .qk_norm import QK_NORM
from .quantized import GATE_QUANTIZED, NORM_QUANTIZED
from .residual_barrier import RESIDUAL_BARRIER
from .rotary_and_write import ROTARY_AND_WRITE
from .silu_and_mul import GELU_AND_MUL, SILU_AND_MUL

PIPELINE: tuple[Pass, ...] = (
    ROTARY_AND_WRITE,  # of the whole model: in a piece the rotation and the write are apart
    CANONICALISE,  # first, so that the others meet one spelling
    RESIDUAL_BARRIER,  # before the norms, which look for the sum that it writes
    ADD_RMS_NORM,  # before rms_norm, which would take the norm and leave the sum
    RMS_NORM,  # the norms without a sum
    QK_NORM,  # joins two of what rms_norm has named
    SILU_AND_MUL,  # meets nothing of the others
    GELU_AND_MUL,  # likewise, in other models
    LINEAR,  # after the barrier, which looks for GEMMs
    ALL_REDUCE_ADD_RMS_NORM,  # before add_rms_norm_linear, which would norm again what was received
    ADD_RMS_NORM_LINEAR,  # joins what the three before it have named
    NORM_QUANTIZED,  # behind the names of norms that it looks for
    GATE_QUANTIZED,  # likewise of gates
    MLP_W8A8,  # joins what the one before it has made
    GATED_W4A16,  # behind the names of gates
    LINEAR_SILU_AND_MUL,  # likewise, of what add_rms_norm_linear has left
    LINEAR_LORA,  # behind the names of GEMMs
    LOWER,  # last: turns what was named into what its provider runs
)
PASS_NAMES: tuple[str, ...] = tuple(step.name for step in PIPELINE)
OUR_NAMES = (*PASS_NAMES, BATCH_INVARIANT.name)  # of which the last is no choice of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewritten:
    """A graph after the passes, with what each did."""

    graph: fx.Graph
    names: tuple[str, ...]  # of the passes
    reports: tuple[PassReport, ...]
    stages: tuple[fx.Graph, ...]  # the graph after each pass


def check_passes(chosen: Sequence[str | Pass]) -> None:
    """Raise ConfigError for a name that no pass has, or a pass of the caller's own that no key could hold."""
    own = [step for step in chosen if isinstance(step, Pass)]
    unknown = [step for step in chosen if not isinstance(step, Pass) and step not in PASS_NAMES]
    if unknown:
        raise ConfigError(f"passes names {unknown}; wanted names out of {list(PASS_NAMES)}, or a Pass")
    for step in own:
        if step.name in OUR_NAMES or [other.name for other in own].count(step.name) > 1:
            raise ConfigError(f"passes holds two of the name {step.name!r}; wanted a name of its own")
        _describe(step)


def all_but(*names: str) -> tuple[str, ...]:
    """The names of all passes but these, for CompileConfig(passes=…); ConfigError for one that is unknown."""
    check_passes(names)
    return tuple(name for name in PASS_NAMES if name not in names)


def select(
    chosen: Sequence[str | Pass] | None, numerics: Numerics, *, batch_invariant: bool = False
) -> tuple[Pass, ...]:
    """The passes to run; in exact mode the model's own ops stay as they are, so none is lowered or joined.

    With batch_invariant the pass of that name runs, too, on what all others have left.
    """
    names = PASS_NAMES if chosen is None else [step for step in chosen if isinstance(step, str)]
    own = tuple(step for step in chosen or () if isinstance(step, Pass))
    steps = (*PIPELINE[:-1], *own, *PIPELINE[-1:])
    taken = [step for step in steps if (step.name in names or step in own) and numerics in step.numerics]
    return (*taken, BATCH_INVARIANT) if batch_invariant else tuple(taken)


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
    reports, stages = [], []
    for step in passes:
        graph, report = _apply(step, graph)
        reports.append(report)
        stages.append(graph)
    names = tuple(step.name for step in passes)
    return Rewritten(graph=graph, names=names, reports=tuple(reports), stages=tuple(stages))


def _apply(step: Pass, graph: fx.Graph) -> tuple[fx.Graph, PassReport]:
    """What a pass makes of a graph; CompileError, naming the pass, where it breaks its promises."""
    before = None if step.name in OUR_NAMES else _content(graph)  # ours are proved to leave it alone
    try:
        result = step.run(graph)
    except LaminaError:
        raise
    except Exception as error:
        raise CompileError(f"the pass {step.name!r} raised {error!r}; mend it, or leave it out") from error
    if before is not None and before != _content(graph):
        raise CompileError(f"the pass {step.name!r} changed the graph it was given; wanted a changed copy")
    if not isinstance(result, tuple) or tuple(map(type, result)) != (fx.Graph, PassReport):
        got = f"{type(result).__name__}"
        raise CompileError(f"the pass {step.name!r} returned {got}; wanted a tuple of graph and PassReport")
    try:
        result[0].lint()
    except Exception as error:
        raise CompileError(f"the pass {step.name!r} made a graph that is none: {error}") from error
    return result


def _content(graph: fx.Graph) -> list[object]:
    """All that a pass might change of a graph."""
    return [(node, node.target, node.args, dict(node.kwargs), dict(node.meta)) for node in graph.nodes]


def describe(passes: Sequence[Pass]) -> tuple[str, ...]:
    """name@version of each, as cache keys hold them; of a caller's own its code with all it refers to."""
    return tuple(_describe(step) for step in passes)


def _describe(step: Pass) -> str:
    if step.name in OUR_NAMES:
        return f"{step.name}@{step.version}"
    try:
        text = describe_value(step.run, whole=True)
    except CannotDescribe as error:
        raise ConfigError(
            f"the pass {step.name!r} depends on {error}, which no cache key can hold; wanted "
            f"numbers, strings, functions and dataclasses in what it closes over, is bound to or names"
        ) from None
    return (
        f"{step.name}@{step.version}+{hashlib.sha256(text.encode()).hexdigest()[:16]} over the {step.scope}"
    )
