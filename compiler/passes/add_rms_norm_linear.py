"""A residual sum, its norm, the projection behind it and the gate behind that, named as one op."""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from .graph import Pass, PassReport, copy_graph, emit, erase_dead, replace
from .providers import Choose, choose

OPS = torch.ops.lamina
GEMMS = (OPS.linear.default, OPS.linear_int8.default)
NAME = "add_rms_norm_linear"


def run(graph: fx.Graph, choose: Choose = choose) -> tuple[fx.Graph, PassReport]:
    graph = copy_graph(graph)
    chosen, skipped = [], []
    for gemm in [node for node in graph.nodes if node.target in GEMMS]:
        norm = _norm_behind(gemm)
        if norm is None:
            continue
        reason = _obstacle(norm, gemm)
        choice = choose(NAME, gemm.meta["val"].device, gemm.meta["val"].dtype)
        if reason or not choice.is_op:
            skipped.append(f"{gemm.name}: {reason or choice.reason}")
            continue
        chosen.append(f"{gemm.name}: {choice.reason}")
        _write(graph, norm, gemm)
    erase_dead(graph)
    return graph, PassReport(name=NAME, num_matches=len(chosen), skipped=tuple(skipped), chosen=tuple(chosen))


def _norm_behind(gemm: fx.Node) -> fx.Node | None:
    """The add_rms_norm whose normed result a projection takes; None where it takes another."""
    normed: Any = gemm.args[0]
    if normed.target is not operator.getitem or normed.args[1] != 0:
        return None
    norm: fx.Node = normed.args[0]
    is_rounded = len(norm.args) == 4  # a sum that is normed before it is rounded stays by itself
    return norm if norm.target is OPS.add_rms_norm.default and is_rounded else None


def _obstacle(norm: fx.Node, gemm: fx.Node) -> str | None:
    normed: Any = gemm.args[0]
    items = [user.args[1] for user in norm.users]
    if len(normed.users) != 1 or items.count(0) != 1:
        return "others read the norm too"
    late = [node.name for node in gemm.all_input_nodes if node is not normed and node.op != "placeholder"]
    return f"{', '.join(late)} may be computed after the sum" if late else None


def _gate_behind(gemm: fx.Node) -> fx.Node | None:
    """The silu_and_mul that alone takes a projection; None where it does not."""
    user, *others = gemm.users
    return user if not others and user.target is OPS.silu_and_mul.default else None


def _operands(gemm: fx.Node) -> tuple[Any, Any, Any]:
    """(weight, scale or None, bias or None) of a projection."""
    if gemm.target is OPS.linear.default:
        _, weight, bias = (*gemm.args, None)[:3]
        return weight, None, bias
    _, weight, scale, bias = (*gemm.args, None)[:4]
    return weight, scale, bias


def _write(graph: fx.Graph, norm: fx.Node, gemm: fx.Node) -> None:
    weight, scale, bias = _operands(gemm)
    gate = _gate_behind(gemm)
    args = (*norm.args, weight, bias, gate is not None, *([] if scale is None else [scale]))
    both = emit(graph, norm, OPS.add_rms_norm_linear.default, *args)
    out, total = (emit(graph, norm, operator.getitem, both, item) for item in (0, 1))
    replace(gate or gemm, out)
    for item in list(norm.users):
        if item.args[1] == 1:
            replace(item, total)


def add_rms_norm_linear_pass(choose: Choose) -> Pass:
    """The pass with another choice of who serves a site."""
    choosing: Callable[[fx.Graph], tuple[fx.Graph, PassReport]] = partial(run, choose=choose)
    return Pass(
        name=NAME,
        version=2,
        reason="at few tokens launches or calls for the norm and the gate cost as much as reading a weight",
        contract="bitwise equal to the three ops one after another, given the same GEMM",
        run=choosing,
        numerics=("fast",),
    )


ADD_RMS_NORM_LINEAR = add_rms_norm_linear_pass(choose)
