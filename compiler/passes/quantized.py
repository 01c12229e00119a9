"""Activations quantized where they are made: by a norm or a gate that projections in one byte read."""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import fx

from .graph import Pass, PassReport, copy_graph, dtype_of, emit, erase_dead, replace, shape_of
from .providers import Choose, choose

OPS = torch.ops.lamina
LINEAR, SCALED_LINEAR = OPS.linear_w8a8.default, OPS.scaled_linear.default
GROUP = 128  # columns that share a scale where the weights have one for so many
SUMS = (OPS.add_rms_norm.default, OPS.add_zero_centred_rms_norm.default)
NORMS = (OPS.rms_norm.default, OPS.zero_centred_rms_norm.default)
GATES = (OPS.silu_and_mul.default, OPS.gelu_and_mul.default)
NORM_NAME, GATE_NAME = "rms_norm_quantized", "act_and_mul_quantized"


def run_norms(graph: fx.Graph, choose: Choose = choose) -> tuple[fx.Graph, PassReport]:
    return _run(graph, NORM_NAME, (*SUMS, *NORMS), choose)


def run_gates(graph: fx.Graph, choose: Choose = choose) -> tuple[fx.Graph, PassReport]:
    return _run(graph, GATE_NAME, GATES, choose)


def _run(graph: fx.Graph, name: str, sources: tuple[Any, ...], choose: Choose) -> tuple[fx.Graph, PassReport]:
    graph = copy_graph(graph)
    chosen, skipped = [], []
    for source in [node for node in graph.nodes if node.target in sources]:
        readers = _readers(source)
        gemms = [reader for reader in readers if reader.target is LINEAR]
        if not gemms:
            continue
        reason = _obstacle(readers, gemms)
        choice = choose(name, gemms[0].meta["val"].device, gemms[0].meta["val"].dtype)
        if reason or not choice.is_op:
            skipped.append(f"{source.name}: {reason or choice.reason}")
            continue
        chosen.append(f"{source.name}: {choice.reason}")
        _write(graph, source, gemms)
    erase_dead(graph)
    return graph, PassReport(name=name, num_matches=len(chosen), skipped=tuple(skipped), chosen=tuple(chosen))


def _readers(source: fx.Node) -> list[fx.Node]:
    """Who reads the normed, or gated, result."""
    if source.target not in SUMS:
        return list(source.users)
    return [reader for item in source.users if item.args[1] == 0 for reader in item.users]


def _format(gemm: fx.Node) -> tuple[int, torch.dtype | None]:
    """Columns that share a scale of the activations, 0: all of a row; and what those are quantized to."""
    weight, scale = cast("tuple[fx.Node, fx.Node]", gemm.args[1:3])
    return GROUP if len(shape_of(scale)) == 2 else 0, dtype_of(weight)


def _obstacle(readers: list[fx.Node], gemms: list[fx.Node]) -> str | None:
    others = [reader.name for reader in readers if reader not in gemms]
    if others:
        return f"{', '.join(others)} needs it as it is"
    return "read in more than one format" if len({_format(gemm) for gemm in gemms}) > 1 else None


def _write(graph: fx.Graph, source: fx.Node, gemms: list[fx.Node]) -> None:
    """The source makes values and scales, which the projections take."""
    both = _quantizing(graph, source, *_format(gemms[0]))
    values, scale = (emit(graph, source, operator.getitem, both, item) for item in (0, 1))
    if source.target in SUMS:
        total = emit(graph, source, operator.getitem, both, 2)
        for item in [user for user in source.users if user.args[1] == 1]:
            replace(item, total)
    for gemm in gemms:
        _, weight, weight_scale, bias = (*gemm.args, None)[:4]
        arguments = values, scale, weight, weight_scale, bias, dtype_of(gemm)
        replace(gemm, emit(graph, gemm, SCALED_LINEAR, *arguments))


def _quantizing(graph: fx.Graph, source: fx.Node, group: int, dtype: torch.dtype | None) -> fx.Node:
    """The op that makes what the source makes, quantized."""
    if source.target in GATES:
        is_gelu = source.target is OPS.gelu_and_mul.default
        return emit(graph, source, OPS.act_and_mul_quantized.default, source.args[0], is_gelu, group, dtype)
    if source.target in NORMS:
        zero_centred = source.target is OPS.zero_centred_rms_norm.default
        return emit(graph, source, OPS.rms_norm_quantized.default, *source.args, group, dtype, zero_centred)
    *operands, unrounded = (*source.args, False)[:5]
    zero_centred = source.target is OPS.add_zero_centred_rms_norm.default
    return emit(
        graph, source, OPS.add_rms_norm_quantized.default, *operands, group, dtype, zero_centred, unrounded
    )


def quantized_norm_pass(choose: Choose) -> Pass:
    """The pass over norms with another choice of who serves a site."""
    choosing: Callable[[fx.Graph], tuple[fx.Graph, PassReport]] = partial(run_norms, choose=choose)
    return Pass(
        name=NORM_NAME,
        version=1,
        reason="the norm has its row at hand: quantizing it there costs no launch, and one byte is written",
        contract="bitwise equal to norm and projection: what is quantized is the norm as it is rounded",
        run=choosing,
        numerics=("fast",),
    )


def quantized_gate_pass(choose: Choose) -> Pass:
    """The pass over gates with another choice of who serves a site."""
    choosing: Callable[[fx.Graph], tuple[fx.Graph, PassReport]] = partial(run_gates, choose=choose)
    return Pass(
        name=GATE_NAME,
        version=1,
        reason="the same of what a gate makes, which the projection behind it reads",
        contract="bitwise equal to gate and projection: what is quantized is the gate as it is rounded",
        run=choosing,
        numerics=("fast",),
    )


NORM_QUANTIZED, GATE_QUANTIZED = quantized_norm_pass(choose), quantized_gate_pass(choose)
