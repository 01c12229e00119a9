"""What adapters add to a dense projection, joined with it: the kernels of both then run beside each other."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from .graph import Pass, PassReport, copy_graph, emit, erase_dead, replace
from .providers import Choose, choose

OPS = torch.ops.lamina
NAME = "linear_lora"
DEFAULTS = (None, False)  # of linear: bias, and batch_invariant


def run(graph: fx.Graph, choose: Choose = choose) -> tuple[fx.Graph, PassReport]:
    graph = copy_graph(graph)
    chosen, skipped = [], []
    for added in graph.find_nodes(op="call_function", target=OPS.lora.default):
        given: tuple[Any, ...] = added.args
        gemm, x, *adapters = given
        if gemm.target is not OPS.linear.default or gemm.args[0] is not x:
            continue
        choice = choose(NAME, gemm.meta["val"].device, gemm.meta["val"].dtype)
        if len(gemm.users) > 1 or not choice.is_op:
            reason = "others read the projection too" if len(gemm.users) > 1 else choice.reason
            skipped.append(f"{added.name}: {reason}")
            continue
        chosen.append(f"{added.name}: {choice.reason}")
        _, weight, bias, batch_invariant = gemm.args + DEFAULTS[len(gemm.args) - 2 :]
        operands = x, weight, bias, *adapters, batch_invariant
        replace(added, emit(graph, added, OPS.linear_lora.default, *operands))
    erase_dead(graph)
    return graph, PassReport(name=NAME, num_matches=len(chosen), skipped=tuple(skipped), chosen=tuple(chosen))


def linear_lora_pass(choose: Choose) -> Pass:
    """The pass with another choice of who serves a site."""
    choosing: Callable[[fx.Graph], tuple[fx.Graph, PassReport]] = partial(run, choose=choose)
    return Pass(
        name=NAME,
        version=1,
        reason="the adapters' kernel begins beside the projection, when what both read is there",
        contract="bitwise equal to projection and adapters, given the same GEMM: it is rounded as before",
        run=choosing,
        numerics=("fast",),
    )


LINEAR_LORA = linear_lora_pass(choose)
