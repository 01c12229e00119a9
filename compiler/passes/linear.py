"""GEMMs by a weight, given to lamina::linear where it has kernels of its own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from .graph import Pass, PassReport, copy_graph, dtype_of, emit, erase_dead, is_row_major, replace, shape_of
from .providers import Choose, choose

ATEN = torch.ops.aten
GEMMS = (ATEN.mm.default, ATEN.addmm.default)
LINEAR_OP = torch.ops.lamina.linear.default


def run(graph: fx.Graph, choose: Choose = choose) -> tuple[fx.Graph, PassReport]:
    graph = copy_graph(graph)
    chosen: list[str] = []
    skipped: list[str] = []
    for node in [node for node in graph.nodes if node.target in GEMMS]:
        reason = obstacle(node)
        if reason:
            skipped.append(f"{node.name}: {reason}")
            continue
        bias, x, transposed = operands(node)
        weight = transposed.args[0]
        choice = choose("linear", node.meta["val"].device, node.meta["val"].dtype)
        (chosen if choice.is_op else skipped).append(f"{node.name}: {choice.reason}")
        if choice.is_op:
            replace(node, emit(graph, node, LINEAR_OP, x, weight, bias))
    erase_dead(graph)
    return graph, PassReport(
        name=LINEAR.name, num_matches=len(chosen), skipped=tuple(skipped), chosen=tuple(chosen)
    )


def operands(node: fx.Node) -> tuple[Any, Any, Any]:
    """(bias or None, x [T, in], weight [in, out]) of a GEMM."""
    return (None, *node.args) if node.target is ATEN.mm.default else node.args  # type: ignore[return-value]


def obstacle(node: fx.Node) -> str | None:
    """Why a GEMM is not a linear of a weight; None where it is."""
    bias, x, transposed = operands(node)
    if node.kwargs:
        return f"scaled sum {dict(node.kwargs)}"
    if not _is_transposed_input(transposed):
        return "the second factor is not a transposed input"
    if not all(isinstance(size, int) for size in shape_of(transposed)):
        return "the second factor has as many columns as there are tokens"
    if not is_row_major(x):
        return "the first factor is laid out otherwise than row by row"
    if bias is not None and str(shape_of(bias)) != str(shape_of(node)[1:]):
        return f"bias of shape {list(shape_of(bias))}, not one number a column"
    if bias is not None and dtype_of(bias) != dtype_of(node):
        return f"bias in {dtype_of(bias)}"
    return None


def _is_transposed_input(node: fx.Node) -> bool:
    if node.target is ATEN.permute.default:
        is_transposed = list(node.args[1]) == [1, 0]  # type: ignore[arg-type]
    else:
        is_transposed = node.target is ATEN.t.default
    source = node.args[0] if is_transposed else None
    return isinstance(source, fx.Node) and source.op == "placeholder" and is_row_major(source)


def linear_pass(choose: Choose) -> Pass:
    """The pass with another choice of who serves a GEMM."""
    choosing: Callable[[fx.Graph], tuple[fx.Graph, PassReport]] = partial(run, choose=choose)
    return Pass(
        name="linear",
        version=2,
        reason="one site with one provider a shape: a GEMM of few rows is bound by reading its weight",
        contract="sums in float32 in an order of the kernel's own, rounded once, as those of the GEMM are",
        run=choosing,
        numerics=("fast",),
    )


LINEAR = linear_pass(choose)
