"""Keeps a GEMM and the residual added to it apart, so that the GEMM's result is rounded first."""

import torch
from torch import fx

from .graph import Pass, PassReport, copy_graph, dtype_of, emit, erase_dead, replace, shape_of

ADD = torch.ops.aten.add.Tensor
CONVERT = torch.ops.prims.convert_element_type.default
GEMMS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)
NARROW = (torch.bfloat16, torch.float16)


def run(graph: fx.Graph) -> tuple[fx.Graph, PassReport]:
    graph = copy_graph(graph)
    matches, skipped = 0, []
    for node in graph.find_nodes(op="call_function", target=ADD):
        if not any(_is_gemm(operand) for operand in node.args):
            continue
        reason = _obstacle(node)
        if reason:
            skipped.append(f"{node.name}: {reason}")
            continue
        wide = [emit(graph, node, CONVERT, operand, torch.float32) for operand in node.args]
        total = emit(graph, node, ADD, *wide)
        replace(node, emit(graph, node, CONVERT, total, dtype_of(node)))
        matches += 1
    erase_dead(graph)
    return graph, PassReport(name=RESIDUAL_BARRIER.name, num_matches=matches, skipped=tuple(skipped))


def _is_gemm(value: object) -> bool:
    while isinstance(value, fx.Node) and value.target in VIEWS:
        value = value.args[0]
    return isinstance(value, fx.Node) and value.target in GEMMS


def _obstacle(node: fx.Node) -> str | None:
    if dtype_of(node) not in NARROW:
        return f"{dtype_of(node)} has no wider sum to round from"
    if node.kwargs:
        return f"scaled sum {node.kwargs}"
    left, right = node.args[:2]
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node) or dtype_of(left) != dtype_of(right):
        return "operands of different dtypes"
    if str(shape_of(left)) != str(shape_of(right)):
        return "operands of different shapes"
    return None


RESIDUAL_BARRIER = Pass(
    name="residual_barrier",
    version=1,
    reason="else the sum is folded into the GEMM by rules that differ by device and torch version",
    contract="bitwise equal: a sum of two narrow floats in float32, rounded once, is their narrow sum",
    run=run,
)
