"""The norms of the heads of queries and keys, which are parts of one tensor, joined to one op."""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from .add_rms_norm import is_ready_before
from .graph import Pass, PassReport, copy_graph, emit, erase_dead, replace, shape_of
from .providers import Choose, choose

OPS = torch.ops.lamina
NORMS = (OPS.rms_norm.default, OPS.zero_centred_rms_norm.default)
SLICE = torch.ops.aten.slice.Tensor
NAME = "qk_norm"


def run(graph: fx.Graph, choose: Choose = choose) -> tuple[fx.Graph, PassReport]:
    graph = copy_graph(graph)
    chosen, skipped, joined = [], [], set()
    norms = [node for node in graph.nodes if node.target in NORMS and _heads_of(node) is not None]
    for position, first in enumerate(norms):
        rest = [other for other in norms[position + 1 :] if other not in joined]
        second = next((other for other in rest if _heads_of(other) is _heads_of(first)), None)
        if first in joined or second is None:
            continue
        joined |= {first, second}
        reason = _obstacle(first, second)
        choice = choose(NAME, first.meta["val"].device, first.meta["val"].dtype)
        if reason or not choice.is_op:
            skipped.append(f"{first.name}: {reason or choice.reason}")
            continue
        chosen.append(f"{first.name}: {choice.reason}")
        _write(graph, first, second)
    erase_dead(graph)
    return graph, PassReport(name=NAME, num_matches=len(chosen), skipped=tuple(skipped), chosen=tuple(chosen))


def _heads_of(norm: fx.Node) -> fx.Node | None:
    """The tensor [T, heads, D] of which a norm takes some heads."""
    part: Any = norm.args[0]
    if part.target is not SLICE or len(shape_of(part)) != 3 or part.args[1] != 1:
        return None
    whole: fx.Node = part.args[0]
    return whole


def _obstacle(first: fx.Node, second: fx.Node) -> str | None:
    """Why two norms of one tensor's heads are not one op; None where they are."""
    if first.target is not second.target:
        return "the other norm's weights are kept otherwise"
    if first.args[2] != second.args[2]:
        return "the other norm has another eps"
    late = [node.name for node in second.all_input_nodes if not is_ready_before(node, first)]
    return f"{', '.join(late)} may be computed after the norm" if late else None


def _write(graph: fx.Graph, first: fx.Node, second: fx.Node) -> None:
    (query, query_weight, eps), (key, key_weight, _) = first.args, second.args
    is_zero_centred = first.target is OPS.zero_centred_rms_norm.default
    operands = (query, key, query_weight, key_weight, eps, is_zero_centred)
    both = emit(graph, first, OPS.qk_norm.default, *operands)
    for item, norm in enumerate((first, second)):
        replace(norm, emit(graph, first, operator.getitem, both, item))


def qk_norm_pass(choose: Choose) -> Pass:
    """The pass with another choice of who serves a site."""
    choosing: Callable[[fx.Graph], tuple[fx.Graph, PassReport]] = partial(run, choose=choose)
    return Pass(
        name=NAME,
        version=1,
        reason="the two have rows of one size and read one tensor: one launch in place of two",
        contract="bitwise equal to the two ops one after another, but for the order of the sums in the means",
        run=choosing,
        numerics=("fast",),
    )


QK_NORM = qk_norm_pass(choose)
