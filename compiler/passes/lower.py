"""Named ops back to the formula that Inductor fuses, where Inductor is their provider."""

import operator
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
from .providers import Choose, choose

FORMULAS: dict[Any, Callable[..., Any]] = {
    torch.ops.lamina.add_rms_norm.default: add_rms_norm,
    torch.ops.lamina.add_zero_centred_rms_norm.default: add_zero_centred_rms_norm,
    torch.ops.lamina.gelu_and_mul.default: gelu_and_mul,
    torch.ops.lamina.rms_norm.default: rms_norm,
    torch.ops.lamina.rotary_embedding.default: rotary_embedding,
    torch.ops.lamina.silu_and_mul.default: silu_and_mul,
    torch.ops.lamina.zero_centred_rms_norm.default: zero_centred_rms_norm,
}
NORMS = (
    *(torch.ops.lamina.rms_norm.default, torch.ops.lamina.zero_centred_rms_norm.default),
    *(torch.ops.lamina.add_rms_norm.default, torch.ops.lamina.add_zero_centred_rms_norm.default),
)
GATES = (torch.ops.lamina.silu_and_mul.default, torch.ops.lamina.gelu_and_mul.default)
# Ops beside which a GEMM begins before what it reads is there, by what they stand behind.
BEGIN_EARLY: Mapping[Any, tuple[str, tuple[Any, ...]]] = {
    torch.ops.lamina.linear_w4a16.default: ("linear_w4a16", NORMS),
    torch.ops.lamina.lora.default: ("lora", (*NORMS, *GATES)),
    torch.ops.lamina.linear_lora.default: ("linear_lora", (*NORMS, *GATES)),
}


def run(
    graph: fx.Graph, formulas: Mapping[Any, Callable[..., Any]] = FORMULAS, choose: Choose = choose
) -> tuple[fx.Graph, PassReport]:
    graph = copy_graph(graph)
    named = [node for node in graph.nodes if node.op == "call_function" and node.target in formulas]
    kept = [node for node in named if _leads_early_loads(node, choose)]
    sites = [node for node in named if node not in kept]
    for node in sites:
        _inline(graph, node, formulas[node.target])
    erase_dead(graph)
    skipped = tuple(f"{node.name}: while it runs a projection loads its weights" for node in kept)
    return graph, PassReport(name=LOWER.name, num_matches=len(sites), skipped=skipped)


def _leads_early_loads(node: fx.Node, choose: Choose) -> bool:
    """Whether a projection reads it by a kernel that begins before it has ended: of weights in four bits, or
    one with adapters, beside which no other op joins it with the projection.

    Behind code that Inductor generates none begins early.
    """
    items = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
    readers = [reader for item in (items or [node]) for reader in item.users if reader.target in BEGIN_EARLY]
    for reader in readers:
        op, leaders = BEGIN_EARLY[reader.target]
        if node.target in leaders and choose(op, *_place_of(reader)).is_op:
            return True
    return False


def _place_of(node: fx.Node) -> tuple[torch.device, torch.dtype]:
    value = node.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    return first.device, first.dtype


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
    version=4,
    numerics=("fast",),
    reason="on this device Inductor's fused kernels win over a call: the neighbours join the same loop",
    contract="bitwise equal to the formula run eagerly, but for the order of the sum inside the mean",
    run=run,
)
