"""RMSNorm, alone or of a residual sum, recognised in ATen and named as one op."""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from .graph import Pass, PassReport, copy_graph, dtype_of, emit, erase_dead, is_row_major, replace, shape_of
from .match import Any_, Call, Match, find

ATEN = torch.ops.aten
CONVERT = (torch.ops.prims.convert_element_type.default,)
ADD, MUL = (ATEN.add.Tensor,), (ATEN.mul.Tensor,)
WIDE = torch.float32


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _norm_patterns(source: Any) -> Iterator[Call]:
    """The norm of `source`, with and without a wider type inside, the square as a power or a product."""
    for widen in (True, False):
        inner = Call(CONVERT, (source, WIDE)) if widen else source
        for square in (Call((ATEN.pow.Tensor_Scalar,), (inner, 2)), Call(MUL, (inner, inner))):
            mean = Call((ATEN.mean.dim,), (square, Any_("dims"), True))
            scale = Call((ATEN.rsqrt.default,), (Call(ADD, (mean, Any_("eps", _is_number))),))
            unit = Call(MUL, (inner, scale), commutes=True)
            rounded = Call(CONVERT, (unit, Any_("rounded_to"))) if widen else unit
            yield Call(MUL, (rounded, Any_("weight", _is_tensor)), commutes=True)


LEFT, RIGHT = Any_("left", _is_tensor), Any_("right", _is_tensor)
_WIDE_SUM = Call(ADD, (Call(CONVERT, (LEFT, WIDE)), Call(CONVERT, (RIGHT, WIDE))))
SUMS = (Call(CONVERT, (_WIDE_SUM, Any_("sum_rounded_to")), name="sum"), Call(ADD, (LEFT, RIGHT), name="sum"))
SUM_PATTERNS = tuple(pattern for total in SUMS for pattern in _norm_patterns(total))
PLAIN_PATTERNS = tuple(_norm_patterns(Any_("x", _is_tensor)))


def run_add_rms_norm(graph: fx.Graph) -> tuple[fx.Graph, PassReport]:
    return _run(graph, ADD_RMS_NORM.name, SUM_PATTERNS, _write_add_rms_norm)


def run_rms_norm(graph: fx.Graph) -> tuple[fx.Graph, PassReport]:
    return _run(graph, RMS_NORM.name, PLAIN_PATTERNS, _write_rms_norm)


def _run(graph: fx.Graph, name: str, patterns: tuple[Call, ...], write: Any) -> tuple[fx.Graph, PassReport]:
    graph = copy_graph(graph)
    matches, skipped = 0, []
    for node in graph.find_nodes(op="call_function", target=ATEN.mul.Tensor):
        match = next((match for pattern in patterns if (match := find(pattern, node))), None)
        if match is None:
            continue
        reason = _obstacle(match)
        if reason:
            skipped.append(f"{node.name}: {reason}")
        else:
            write(graph, match)
            matches += 1
    erase_dead(graph)
    return graph, PassReport(name=name, num_matches=matches, skipped=tuple(skipped))


def _obstacle(match: Match) -> str | None:
    """Why the formula, though it looks right, is not this op; None where it is."""
    bound, result = match.bound, match.root
    tensors = [bound[name] for name in ("x", "left", "right", "sum") if name in bound]
    source, weight = tensors[-1], bound["weight"]
    dtypes = {dtype_of(node) for node in (*tensors, weight, result)}
    if len(dtypes) != 1:
        return f"mixed dtypes {sorted(str(dtype) for dtype in dtypes)}"
    if any(
        bound.get(name, dtype_of(result)) != dtype_of(result) for name in ("rounded_to", "sum_rounded_to")
    ):
        return "rounds to another dtype than it returns"
    if dtype_of(result) in (torch.bfloat16, torch.float16) and "rounded_to" not in bound:
        return "computes in a narrow dtype, the op in float32"
    if dtype_of(result) == torch.float64 and bound.keys() & {"rounded_to", "sum_rounded_to"}:
        return "computes in float32, the op in float64"
    if len({str(shape_of(node)) for node in (*tensors, result)}) != 1:
        return "operands of different shapes"
    if not all(is_row_major(node) for node in (result, bound.get("sum", result))):
        return "laid out otherwise than row by row, as the op's results are"
    last = len(shape_of(source)) - 1
    if list(bound["dims"]) not in ([-1], [last]):
        return f"reduces over {list(bound['dims'])}, not over the last dimension"
    if str(shape_of(weight)) != str(shape_of(source)[-1:]):
        return f"weight of shape {list(shape_of(weight))}, not one number a channel"
    if "sum" in bound and not _is_ready_before(weight, bound["sum"]):
        return "the weight is computed after the sum"
    return None


def _is_ready_before(node: fx.Node, other: fx.Node) -> bool:
    order = {member: position for position, member in enumerate(node.graph.nodes)}
    return order[node] < order[other]


def _write_add_rms_norm(graph: fx.Graph, match: Match) -> None:
    bound, total = match.bound, match.bound["sum"]
    op = torch.ops.lamina.add_rms_norm.default
    both = emit(graph, total, op, bound["left"], bound["right"], bound["weight"], float(bound["eps"]))
    normed, new_total = (emit(graph, total, operator.getitem, both, item) for item in (0, 1))
    replace(match.root, normed)
    replace(total, new_total)


def _write_rms_norm(graph: fx.Graph, match: Match) -> None:
    bound = match.bound
    op = torch.ops.lamina.rms_norm.default
    replace(match.root, emit(graph, match.root, op, bound["x"], bound["weight"], float(bound["eps"])))


ADD_RMS_NORM = Pass(
    name="add_rms_norm",
    version=1,
    reason="one site with one provider, and the sum is written once for the norm and the next residual",
    contract="bitwise equal to the formula run eagerly: sum, unit vector and result are rounded as there",
    run=run_add_rms_norm,
)
RMS_NORM = Pass(
    name="rms_norm",
    version=1,
    reason="what add_rms_norm left: the first norm of a model has no residual",
    contract="bitwise equal to the formula run eagerly",
    run=run_rms_norm,
)
