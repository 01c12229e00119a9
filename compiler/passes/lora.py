"""What adapters add to a projection, joined with the gate or the residual sum and norm that alone read it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from .graph import Pass, PassReport, copy_graph, emit, erase_dead, replace
from .providers import Choose, choose

OPS = torch.ops.lamina
LORA, GATE, NORM = OPS.lora.default, OPS.silu_and_mul.default, OPS.add_rms_norm.default
GATE_NAME, NORM_NAME = "lora_silu_and_mul", "lora_add_rms_norm"
ROWS = 6  # the argument rows of lora


def run_gates(graph: fx.Graph, choose: Choose = choose) -> tuple[fx.Graph, PassReport]:
    return _run(graph, GATE_NAME, GATE, _write_gate, choose)


def run_norms(graph: fx.Graph, choose: Choose = choose) -> tuple[fx.Graph, PassReport]:
    return _run(graph, NORM_NAME, NORM, _write_norm, choose)


def _run(
    graph: fx.Graph, name: str, target: Any, write: Callable[..., None], choose: Choose
) -> tuple[fx.Graph, PassReport]:
    graph = copy_graph(graph)
    chosen, skipped = [], []
    for reader in list(graph.find_nodes(op="call_function", target=target)):
        lora = next((value for value in reader.args[:2] if _is_lora(value)), None)
        if lora is None:
            continue
        reason = _obstacle(reader, lora)
        choice = choose(name, lora.meta["val"].device, lora.meta["val"].dtype)
        if reason or not choice.is_op:
            skipped.append(f"{reader.name}: {reason or choice.reason}")
            continue
        chosen.append(f"{reader.name}: {choice.reason}")
        write(graph, reader, lora)
    erase_dead(graph)
    return graph, PassReport(name=name, num_matches=len(chosen), skipped=tuple(skipped), chosen=tuple(chosen))


def _is_lora(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.target is LORA


def _obstacle(reader: fx.Node, lora: fx.Node) -> str | None:
    """Why what adapters add to must be there by itself, None where it need not be."""
    if len(lora.users) > 1:
        return "others read the projection too"
    rows: Any = lora.args[ROWS]
    if reader.target is GATE:
        is_halves = len(rows) == 2 and rows[0] == rows[1]
        return None if is_halves else f"parts of {list(rows)} outputs, not the gate and as many of up"
    if len(rows) > 1:
        return f"parts of {list(rows)} outputs, not one"
    if reader.args[0] is reader.args[1]:
        return "the projection is added to itself"
    return "the sum is normed before it is rounded" if True in reader.args[4:] else None


def _write_gate(graph: fx.Graph, gate: fx.Node, lora: fx.Node) -> None:
    replace(gate, emit(graph, gate, OPS.lora_silu_and_mul.default, *lora.args))


def _write_norm(graph: fx.Graph, norm: fx.Node, lora: fx.Node) -> None:
    left, right, weight, eps, *_ = norm.args
    residual = right if lora is left else left
    replace(norm, emit(graph, norm, OPS.lora_add_rms_norm.default, *lora.args, residual, weight, eps))


def lora_gate_pass(choose: Choose) -> Pass:
    """The pass over gates with another choice of who serves a site."""
    choosing: Callable[[fx.Graph], tuple[fx.Graph, PassReport]] = partial(run_gates, choose=choose)
    return Pass(
        name=GATE_NAME,
        version=1,
        reason="the kernel has the outputs of gate and up at hand: no launch, and half is written",
        contract="bitwise equal to the two ops one after the other, given the same exponential",
        run=choosing,
        numerics=("fast",),
    )


def lora_norm_pass(choose: Choose) -> Pass:
    """The pass over norms with another choice of who serves a site."""
    choosing: Callable[[fx.Graph], tuple[fx.Graph, PassReport]] = partial(run_norms, choose=choose)
    return Pass(
        name=NORM_NAME,
        version=1,
        reason="a cluster has whole rows of the outputs: it adds and norms them without another launch",
        contract="bitwise equal to both ops one after the other, but for the order of the sum in the mean",
        run=choosing,
        numerics=("fast",),
    )


LORA_GATE, LORA_NORM = lora_gate_pass(choose), lora_norm_pass(choose)
