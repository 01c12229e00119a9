"""A sum over ranks and the residual sum and norm that alone read it, named as one op."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from .graph import Pass, PassReport, copy_graph, emit, erase_dead, replace
from .providers import Choose, choose

OPS = torch.ops.lamina
NAME = "all_reduce_add_rms_norm"


def run(graph: fx.Graph, choose: Choose = choose) -> tuple[fx.Graph, PassReport]:
    graph = copy_graph(graph)
    chosen, skipped = [], []
    for norm in list(graph.find_nodes(op="call_function", target=OPS.add_rms_norm.default)):
        total = next((node for node in norm.args[:2] if _is_all_reduce(node)), None)
        if total is None:
            continue
        reason = _obstacle(norm, total)
        choice = choose(NAME, total.meta["val"].device, total.meta["val"].dtype)
        if reason or not choice.is_op:
            skipped.append(f"{norm.name}: {reason or choice.reason}")
            continue
        chosen.append(f"{norm.name}: {choice.reason}")
        _write(graph, norm, total)
    erase_dead(graph)
    return graph, PassReport(name=NAME, num_matches=len(chosen), skipped=tuple(skipped), chosen=tuple(chosen))


def _is_all_reduce(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.target is OPS.all_reduce.default


def _obstacle(norm: fx.Node, total: fx.Node) -> str | None:
    """Why the sum over ranks must be there by itself, None where it need not be."""
    if norm.args[0] is norm.args[1]:
        return "a sum over ranks is added to itself"
    return None if len(total.users) == 1 else "others read the sum over ranks too"


def _write(graph: fx.Graph, norm: fx.Node, total: fx.Node) -> None:
    left, right, weight, eps, *unrounded = norm.args
    residual = right if total is left else left
    x, world_size = total.args
    args = (x, residual, weight, eps, world_size, *unrounded)
    replace(norm, emit(graph, norm, OPS.all_reduce_add_rms_norm.default, *args))


def all_reduce_add_rms_norm_pass(choose: Choose) -> Pass:
    """The pass with another choice of who serves a site."""
    choosing: Callable[[fx.Graph], tuple[fx.Graph, PassReport]] = partial(run, choose=choose)
    return Pass(
        name=NAME,
        version=1,
        reason="between ranks a launch that adds and norms what it has just received saves one, and a read",
        contract="bitwise equal to the two ops one after another",
        run=choosing,
        numerics=("fast",),
    )


ALL_REDUCE_ADD_RMS_NORM = all_reduce_add_rms_norm_pass(choose)
