"""RMSNorm, alone or of a residual sum, by either kind of weight, recognised in ATen and named as one op."""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from .graph import Pass, PassReport, copy_graph, dtype_of, emit, erase_dead, is_row_major, replace, shape_of
from .match import Any_, Call, Match, find

ATEN, OPS = torch.ops.aten, torch.ops.lamina
CONVERT = (torch.ops.prims.convert_element_type.default,)
ADD, MUL = (ATEN.add.Tensor,), (ATEN.mul.Tensor,)
ADD_EPS = (ATEN.add.Tensor, ATEN.add.Scalar)  # the latter is torch's own rms_norm
WIDE = torch.float32
NARROW = (torch.bfloat16, torch.float16)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_one(value: Any) -> bool:
    return _is_number(value) and value == 1


NARROW_WEIGHT = Any_("weight", lambda value: _is_tensor(value) and dtype_of(value) in NARROW)
TWO = Any_("power", lambda value: _is_number(value) and value == 2)  # 2.0 squares as well
WEIGHT, ROUNDED_TO = Any_("weight", _is_tensor), Any_("rounded_to")


def _norms(source: Any) -> Iterator[Call]:
    """source over its root mean square, the square as a power or a multiplication."""
    for square in (Call((ATEN.pow.Tensor_Scalar,), (source, TWO)), Call(MUL, (source, source))):
        mean = Call((ATEN.mean.dim,), (square, Any_("dims"), True))
        scale = Call((ATEN.rsqrt.default,), (Call(ADD_EPS, (mean, Any_("eps", _is_number))),))
        yield Call(MUL, (source, scale), commutes=True)


def _with_weight(unit: Call, is_rounded: bool) -> Iterator[Call]:
    """A unit vector times 1 + weight, then rounded where `is_rounded`; or rounded first, and times weight."""
    factor = Call(ADD, (Call(CONVERT, (WEIGHT, WIDE)) if is_rounded else WEIGHT, Any_("one", _is_one)))
    shifted = Call(MUL, (unit, factor), name="zero_centred", commutes=True)
    yield Call(CONVERT, (shifted, ROUNDED_TO)) if is_rounded else shifted
    rounded = Call(CONVERT, (unit, ROUNDED_TO)) if is_rounded else unit
    yield Call(MUL, (rounded, WEIGHT), commutes=True)
    if is_rounded:  # torch's own rms_norm, which is none of our ops
        weighted = Call(MUL, (unit, NARROW_WEIGHT), name="weighted_wide", commutes=True)
        yield Call(CONVERT, (weighted, ROUNDED_TO))


def _of(source: Any) -> Iterator[Call]:
    """The norm of a tensor, with and without a wider type inside; 1 + weight goes before a weight so made."""
    for is_wider in (True, False):
        inner = Call(CONVERT, (source, WIDE)) if is_wider else source
        for unit in _norms(inner):
            yield from _with_weight(unit, is_wider)


LEFT, RIGHT = Any_("left", _is_tensor), Any_("right", _is_tensor)
_WIDE_SUM = Call(ADD, (Call(CONVERT, (LEFT, WIDE)), Call(CONVERT, (RIGHT, WIDE))))
_UNROUNDED = Call(ADD, _WIDE_SUM.args, name="unrounded")
SUMS = (Call(CONVERT, (_WIDE_SUM, Any_("sum_rounded_to")), name="sum"), Call(ADD, (LEFT, RIGHT), name="sum"))
SUM_PATTERNS = (
    *(pattern for unit in _norms(_UNROUNDED) for pattern in _with_weight(unit, True)),
    *(pattern for total in SUMS for pattern in _of(total)),
)
PLAIN_PATTERNS = tuple(_of(Any_("x", _is_tensor)))


def run_add_rms_norm(graph: fx.Graph) -> tuple[fx.Graph, PassReport]:
    return _run(graph, ADD_RMS_NORM.name, SUM_PATTERNS, _write_add_rms_norm)


def run_rms_norm(graph: fx.Graph) -> tuple[fx.Graph, PassReport]:
    return _run(graph, RMS_NORM.name, PLAIN_PATTERNS, _write_rms_norm)


def _run(graph: fx.Graph, name: str, patterns: tuple[Call, ...], write: Any) -> tuple[fx.Graph, PassReport]:
    graph = copy_graph(graph)
    matches, skipped = 0, []
    covered: set[fx.Node] = set()
    for node in list(_roots(graph)):
        match = next((match for pattern in patterns if (match := find(pattern, node))), None)
        if match is None or node in covered:
            continue
        covered |= match.inside
        reason = _obstacle(match)
        if reason:
            skipped.append(f"{node.name}: {reason}")
        else:
            write(graph, match)
            matches += 1
    erase_dead(graph)
    return graph, PassReport(name=name, num_matches=matches, skipped=tuple(skipped))


def _roots(graph: fx.Graph) -> Iterator[fx.Node]:
    """Multiplications, each behind its rounding: the norm that ends there holds one that ends before."""
    for node in graph.find_nodes(op="call_function", target=ATEN.mul.Tensor):
        yield from (user for user in node.users if user.target in CONVERT)
        yield node


def _obstacle(match: Match) -> str | None:
    """Why the formula, though it looks right, is not this op; None where it is."""
    bound, result = match.bound, match.root
    tensors = [bound[name] for name in ("x", "left", "right", "sum") if name in bound]
    source, weight = tensors[-1], bound["weight"]
    if "weighted_wide" in bound:
        return "rounds after the weight, as F.rms_norm does, and not before it; ops.rms_norm has a kernel"
    dtypes = {dtype_of(node) for node in (*tensors, weight, result)}
    if len(dtypes) != 1:
        return f"mixed dtypes {sorted(str(dtype) for dtype in dtypes)}"
    if any(
        bound.get(name, dtype_of(result)) != dtype_of(result) for name in ("rounded_to", "sum_rounded_to")
    ):
        return "rounds to another dtype than it returns"
    if dtype_of(result) in NARROW and "rounded_to" not in bound:
        return "computes in a narrow dtype, the op in float32"
    if dtype_of(result) == torch.float64 and bound.keys() & {"rounded_to", "sum_rounded_to"}:
        return "computes in float32, the op in float64"
    if len({str(shape_of(node)) for node in (*tensors, result)}) != 1:
        return "operands of different shapes"
    total: fx.Node = bound.get("sum") or bound.get("unrounded") or result
    if not all(is_row_major(node) for node in (result, total)):
        return "laid out otherwise than row by row, as the op's results are"
    last = len(shape_of(source)) - 1
    if list(bound["dims"]) not in ([-1], [last]):
        return f"reduces over {list(bound['dims'])}, not over the last dimension"
    if str(shape_of(weight)) != str(shape_of(source)[-1:]):
        return f"weight of shape {list(shape_of(weight))}, not one number a channel"
    if total is not result and not is_ready_before(weight, total):
        return "the weight is computed after the sum"
    return None


def is_ready_before(node: fx.Node, other: fx.Node) -> bool:
    """Whether a node stands before another of its graph."""
    return (
        next(member for member in node.graph.nodes if member in (node, other)) is node and node is not other
    )


def _write_add_rms_norm(graph: fx.Graph, match: Match) -> None:
    bound = match.bound
    op = OPS.add_zero_centred_rms_norm if "zero_centred" in bound else OPS.add_rms_norm
    arguments = (bound["left"], bound["right"], bound["weight"], float(bound["eps"]))
    total = bound.get("sum")
    if total is not None:
        both = emit(graph, total, op.default, *arguments)
        replace(total, emit(graph, total, operator.getitem, both, 1))
    else:
        total = bound["unrounded"]
        both = emit(graph, total, op.default, *arguments, True)
        for rounded in [user for user in total.users if _rounds_to(user, dtype_of(match.root))]:
            replace(rounded, emit(graph, rounded, operator.getitem, both, 1))
    replace(match.root, emit(graph, total, operator.getitem, both, 0))


def _rounds_to(node: fx.Node, dtype: torch.dtype | None) -> bool:
    return node.target in CONVERT and node.args[1] == dtype


def _write_rms_norm(graph: fx.Graph, match: Match) -> None:
    bound = match.bound
    op = OPS.zero_centred_rms_norm if "zero_centred" in bound else OPS.rms_norm
    replace(match.root, emit(graph, match.root, op.default, bound["x"], bound["weight"], float(bound["eps"])))


ADD_RMS_NORM = Pass(
    name="add_rms_norm",
    version=3,
    reason="one site with one provider, and the sum is written once for the norm and the next residual",
    contract="bitwise equal to the formula run eagerly: sum, unit vector and result are rounded as there",
    run=run_add_rms_norm,
)
RMS_NORM = Pass(
    name="rms_norm",
    version=3,
    reason="what add_rms_norm left: the first norm of a model has no residual",
    contract="bitwise equal to the formula run eagerly",
    run=run_rms_norm,
)
