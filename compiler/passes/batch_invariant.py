"""GEMMs whose rows have the same bits in any batch: each by kernels that sum in one order, or refused."""

from typing import Any

import torch
from torch import fx

from ...common.errors import CompileError
from ..capture.fingerprint import source_line
from . import linear
from .graph import Pass, PassReport, copy_graph, emit, erase_dead, replace

ATEN, OPS = torch.ops.aten, torch.ops.lamina
FLAGS: dict[Any, int] = {  # which argument is batch_invariant
    OPS.linear.default: 3,
    OPS.linear_silu_and_mul.default: 3,
    OPS.linear_lora.default: 8,
    OPS.add_rms_norm_linear.default: 8,
}
SUMMED_BY_LIBRARIES = (
    *(ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default, ATEN.baddbmm.default, ATEN.mv.default),
    *(ATEN.addmv.default, ATEN.dot.default, ATEN.convolution.default, ATEN._int_mm.default),
)
BY_ROWS_ALREADY = (
    OPS.linear_w4a16.default,
    OPS.linear_blocks.default,
)  # on CPUs; what a GPU cannot is refused before it compiles


def run(graph: fx.Graph) -> tuple[fx.Graph, PassReport]:
    graph = copy_graph(graph)
    named = [node for node in graph.nodes if node.op == "call_function"]
    for node in named:
        if node.target in linear.GEMMS and linear.obstacle(node) is None:
            bias, x, transposed = linear.operands(node)
            replace(node, emit(graph, node, linear.LINEAR_OP, x, transposed.args[0], bias, True))
        elif node.target in FLAGS:
            place = FLAGS[node.target]
            rest = [
                argument.default_value for argument in node.target._schema.arguments[len(node.args) : place]
            ]
            replace(node, emit(graph, node, node.target, *node.args[:place], *rest, True))
        elif node.target in SUMMED_BY_LIBRARIES or _is_other_gemm(node):
            raise CompileError(
                f"{node.name} ({node.target}) has other bits in other batches; wanted batch_invariant=False, "
                f"or projections of tokens by weights{source_line(node)}"
            )
    erase_dead(graph)
    num_matches = sum(node.target in FLAGS for node in graph.nodes)
    return graph, PassReport(name=BATCH_INVARIANT.name, num_matches=num_matches)


def _is_other_gemm(node: fx.Node) -> bool:
    """Whether it is a GEMM of ours whose kernel is chosen by the number of rows."""
    name = getattr(node.target, "__module__", "") and str(node.target)
    return name.startswith("lamina.") and "linear" in name and node.target not in BY_ROWS_ALREADY


BATCH_INVARIANT = Pass(
    name="batch_invariant",
    version=1,
    reason="which kernel is fastest depends on the number of rows, and in which order it sums, on the kernel",
    contract="sums in an order that the weight's shape gives, the same for every number of rows",
    run=run,
)
