"""SiLU of a gate times what it gates, made where the sums of a dense projection are.

Of those that add_rms_norm_linear has left: behind a sum over ranks, or a norm that others read.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import fx

from .graph import Pass, PassReport, copy_graph, emit, erase_dead, replace
from .providers import Choose, choose

OPS = torch.ops.lamina
NAME = "linear_silu_and_mul"


def run(graph: fx.Graph, choose: Choose = choose) -> tuple[fx.Graph, PassReport]:
    graph = copy_graph(graph)
    chosen, skipped = [], []
    for gate in graph.find_nodes(op="call_function", target=OPS.silu_and_mul.default):
        gemm = gate.args[0]
        if gemm.target is not OPS.linear.default:
            continue
        choice = choose(NAME, gemm.meta["val"].device, gemm.meta["val"].dtype)
        if len(gemm.users) > 1 or not choice.is_op:
            reason = "others read the projection too" if len(gemm.users) > 1 else choice.reason
            skipped.append(f"{gate.name}: {reason}")
            continue
        chosen.append(f"{gate.name}: {choice.reason}")
        replace(gate, emit(graph, gate, OPS.linear_silu_and_mul.default, *gemm.args))
    erase_dead(graph)
    return graph, PassReport(name=NAME, num_matches=len(chosen), skipped=tuple(skipped), chosen=tuple(chosen))


def linear_silu_and_mul_pass(choose: Choose) -> Pass:
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


LINEAR_SILU_AND_MUL = linear_silu_and_mul_pass(choose)
