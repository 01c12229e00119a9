"""Named ops back to the formula that Inductor fuses, where Inductor is their provider."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ...custom_ops.add_rms_norm.reference import add_rms_norm
from ...custom_ops.add_zero_centred_rms_norm.reference import add_zero_centred_rms_norm
from ...custom_ops.gelu_and_mul.reference import gelu_and_mul
from ...custom_ops.rms_norm.reference import rms_norm
from ...custom_ops.rotary_embedding.reference import rotary_embedding
from ...custom_ops.silu_and_mul.reference import silu_and_mul
from ...custom_ops.zero_centred_rms_norm.reference import zero_centred_rms_norm
from ..torch_internals import torch_compat
from .graph import Pass, PassReport, copy_graph, erase_dead

FORMULAS: dict[Any, Callable[..., Any]] = {
    torch.ops.lamina.add_rms_norm.default: add_rms_norm,
    torch.ops.lamina.add_zero_centred_rms_norm.default: add_zero_centred_rms_norm,
    torch.ops.lamina.gelu_and_mul.default: gelu_and_mul,
    torch.ops.lamina.rms_norm.default: rms_norm,
    torch.ops.lamina.rotary_embedding.default: rotary_embedding,
    torch.ops.lamina.silu_and_mul.default: silu_and_mul,
    torch.ops.lamina.zero_centred_rms_norm.default: zero_centred_rms_norm,
}


def run(
    graph: fx.Graph, formulas: Mapping[Any, Callable[..., Any]] = FORMULAS
) -> tuple[fx.Graph, PassReport]:
    graph = copy_graph(graph)
    sites = [node for node in graph.nodes if node.op == "call_function" and node.target in formulas]
    for node in sites:
        _inline(graph, node, formulas[node.target])
    erase_dead(graph)
    return graph, PassReport(name=LOWER.name, num_matches=len(sites))


def _inline(graph: fx.Graph, site: fx.Node, formula: Callable[..., Any]) -> None:
    """Put the formula's own ATen graph in the place of one call."""
    tensors = [argument for argument in site.args if isinstance(argument, fx.Node)]

    def call(*values: Any) -> Any:
        given = iter(values)
        return formula(
            *(next(given) if isinstance(argument, fx.Node) else argument for argument in site.args)
        )

    traced = torch_compat.trace_formula(call, [node.meta["val"] for node in tensors])
    copies = dict(zip(traced.find_nodes(op="placeholder"), tensors, strict=True))
    with graph.inserting_before(site):
        for node in traced.nodes:
            if node.op == "call_function":
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].meta.setdefault("stack_trace", site.meta.get("stack_trace"))
    results: Any = traced.output_node().args[0]
    if isinstance(results, fx.Node):
        site.replace_all_uses_with(copies[results])
        return
    for user in list(site.users):
        user.replace_all_uses_with(copies[results[user.args[1]]])
        graph.erase_node(user)


LOWER = Pass(
    name="lower",
    version=2,
    numerics=("fast",),
    reason="on this device Inductor's fused kernels win over a call: the neighbours join the same loop",
    contract="bitwise equal to the formula run eagerly, but for the order of the sum inside the mean",
    run=run,
)
