"""Gate, up and down of an MLP with weights in one byte, which one op serves by fewer launches at few rows."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import fx

from .graph import Pass, PassReport, copy_graph, dtype_of, emit, erase_dead, replace, shape_of
from .providers import Choose, choose

OPS = torch.ops.lamina
SCALED_LINEAR, GATE = OPS.scaled_linear.default, OPS.act_and_mul_quantized.default
NAME = "mlp_w8a8"
SILU = False  # the gate's argument gelu


def run(graph: fx.Graph, choose: Choose = choose) -> tuple[fx.Graph, PassReport]:
    graph = copy_graph(graph)
    chosen, skipped = [], []
    for gate in graph.find_nodes(op="call_function", target=GATE):
        first: Any = gate.args[0]
        if first.target is not SCALED_LINEAR or gate.args[1] is not SILU:
            continue
        down = _reader(gate)
        reason = _obstacle(first, down)
        choice = choose(NAME, first.meta["val"].device, first.meta["val"].dtype)
        if reason or not choice.is_op:
            skipped.append(f"{gate.name}: {reason or choice.reason}")
            continue
        chosen.append(f"{gate.name}: {choice.reason}")
        replace(down, emit(graph, down, OPS.mlp_w8a8.default, *first.args[:5], *down.args[2:]))
    erase_dead(graph)
    return graph, PassReport(name=NAME, num_matches=len(chosen), skipped=tuple(skipped), chosen=tuple(chosen))


def _reader(gate: fx.Node) -> Any:
    """The projection that alone reads values and scale of the gate; None where others do."""
    readers = {reader for item in gate.users for reader in item.users}
    return readers.pop() if len(readers) == 1 else None


def _obstacle(first: fx.Node, down: fx.Node | None) -> str | None:
    """Why the three must stay apart."""
    if len(first.users) > 1:
        return "others read the projection too"
    if down is None or down.target is not SCALED_LINEAR:
        return "it is not one projection that reads the gate"
    return "weights in more than one format" if _format(first) != _format(down) else None


def _format(gemm: fx.Node) -> tuple[Any, int]:
    """What the weights are kept in, and how many dimensions their scales have."""
    weight, scale = cast("tuple[fx.Node, fx.Node]", gemm.args[2:4])
    return dtype_of(weight), len(shape_of(scale))


def mlp_w8a8_pass(choose: Choose) -> Pass:
    """The pass with another choice of who serves a site."""
    choosing: Callable[[fx.Graph], tuple[fx.Graph, PassReport]] = partial(run, choose=choose)
    return Pass(
        name=NAME,
        version=1,
        reason="of few rows the gate is made where its sums are, and quantized while down's weights come",
        contract="bitwise equal to the three ops, given the same GEMMs: each is rounded as before",
        run=choosing,
        numerics=("fast",),
    )


MLP_W8A8 = mlp_w8a8_pass(choose)
