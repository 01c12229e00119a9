"""SiLU of a gate times what it gates, made where the sums of a projection in four bits are."""

from collections.abc import Callable
from functools import partial

import torch
from torch import fx

from .graph import Pass, PassReport, copy_graph, emit, erase_dead, replace
from .providers import Choose, choose

OPS = torch.ops.lamina
LINEAR = OPS.linear_w4a16.default
NAME, OP = "gated_w4a16", "linear_w4a16"
GATED = 7  # the argument silu_and_mul


def run(graph: fx.Graph, choose: Choose = choose) -> tuple[fx.Graph, PassReport]:
    graph = copy_graph(graph)
    chosen, skipped = [], []
    for gate in graph.find_nodes(op="call_function", target=OPS.silu_and_mul.default):
        gemm = gate.args[0]
        if gemm.target is not LINEAR or True in gemm.args[GATED:]:  # the latter: it is gated itself
            continue
        reason = _obstacle(gemm)
        choice = choose(OP, gemm.meta["val"].device, gemm.meta["val"].dtype)
        if reason or not choice.is_op:
            skipped.append(f"{gate.name}: {reason or choice.reason}")
            continue
        chosen.append(f"{gate.name}: {choice.reason}")
        arguments = (*gemm.args, False)[:GATED]  # all but the last may be left out of a call
        replace(gate, emit(graph, gate, LINEAR, *arguments, True))
    erase_dead(graph)
    return graph, PassReport(name=NAME, num_matches=len(chosen), skipped=tuple(skipped), chosen=tuple(chosen))


def _obstacle(gemm: fx.Node) -> str | None:
    """Why a projection must stay as it is."""
    return "others read the projection too" if len(gemm.users) > 1 else None


def gated_w4a16_pass(choose: Choose) -> Pass:
    """The pass with another choice of who serves a site."""
    choosing: Callable[[fx.Graph], tuple[fx.Graph, PassReport]] = partial(run, choose=choose)
    return Pass(
        name=NAME,
        version=1,
        reason="the kernel has gate and up of a row in the same block: no launch, and half is written",
        contract="bitwise equal to projection and gate, given the same GEMM: each is rounded as before",
        run=choosing,
        numerics=("fast",),
    )


GATED_W4A16 = gated_w4a16_pass(choose)
