"""The GEMMs that a graph leaves to ops of ours, as far as the kernel choice depends on them."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from ...custom_ops.linear.choices import kept_as
from ...custom_ops.linear_w4a16.configs import weights_name
from .batch_invariant import FLAGS
from .graph import dtype_of, shape_of

OPS = torch.ops.lamina
Kind = Literal["linear", "linear_gated", "norm", "norm_gated", "gated", "quantizing"]
BYTE_ARGUMENTS: dict[Any, tuple[tuple[Kind, int, int], ...]] = {  # which are weights and their scales
    OPS.linear_w8a8.default: (("quantizing", 1, 2),),
    OPS.scaled_linear.default: (("linear", 2, 3),),
    OPS.mlp_w8a8.default: (("norm_gated", 2, 3), ("quantizing", 5, 6)),
}
FOUR_BITS = OPS.linear_w4a16.default


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemm:
    """x [T, columns] by a weight [rows, columns]: alone, behind a norm, gated, or quantizing its x."""

    kind: Kind
    rows: int
    columns: int
    dtype: str
    weights: str = "dense"  # how they are kept, as custom_ops/linear/choices.py names it
    batch_invariant: bool = False


def gemms(graph: fx.Graph) -> tuple[Gemm, ...]:
    """Each GEMM once, in the order of the graph."""
    return tuple(dict.fromkeys(gemm for node in graph.nodes for gemm in _gemms(node)))


def _gemms(node: fx.Node) -> tuple[Gemm, ...]:
    if node.target in BYTE_ARGUMENTS:
        return tuple(_byte_gemm(node, *arguments) for arguments in BYTE_ARGUMENTS[node.target])
    gemm = _gemm(node)
    return () if gemm is None else (gemm,)


def _byte_gemm(node: fx.Node, kind: Kind, *arguments: int) -> Gemm:
    weight, scale = (node.args[at] for at in arguments)
    rows, columns = shape_of(weight)  # type: ignore[arg-type]
    kept = kept_as(dtype_of(weight), len(shape_of(scale)))  # type: ignore[arg-type]
    dtype = str(dtype_of(node)).removeprefix("torch.")
    return Gemm(kind=kind, rows=rows, columns=columns, dtype=dtype, weights=kept)


def _four_bit_gemm(node: fx.Node) -> Gemm | None:
    """One by the kernel of shuffled weights; others have no configuration to choose."""
    x, weight, *_, group, shuffled, gated = (*node.args, False, False)[:8]
    if not shuffled:
        return None
    rows, columns = shape_of(weight)[0], shape_of(x)[1]  # type: ignore[arg-type]
    kept = weights_name(group, columns, 8 if dtype_of(weight) == torch.int8 else 4)  # type: ignore[arg-type]
    dtype = str(dtype_of(node)).removeprefix("torch.")
    return Gemm(kind="gated" if gated else "linear", rows=rows, columns=columns, dtype=dtype, weights=kept)


def _gemm(node: fx.Node) -> Gemm | None:
    args: Any = node.args
    kind: Kind = "linear"
    if node.target is FOUR_BITS:
        return _four_bit_gemm(node)
    batch_invariant = node.target in FLAGS and True in args[FLAGS[node.target] :]
    if node.target in (OPS.linear.default, OPS.linear_lora.default):
        weight = args[1]
    elif node.target is OPS.add_rms_norm_linear.default:
        kind, weight = ("norm_gated" if args[6] else "norm"), args[4]
    elif node.target is OPS.linear_silu_and_mul.default:
        kind, weight = "linear_gated", args[1]
    else:
        return None
    if dtype_of(weight) != dtype_of(args[0]):
        return None  # kept by a quantization scheme, whose kernel is chosen by the number of rows alone
    rows, columns = shape_of(weight)
    if not isinstance(rows, int) or not isinstance(columns, int):
        return None  # as many as there are tokens: no weight
    dtype = str(dtype_of(weight)).removeprefix("torch.")
    return Gemm(kind=kind, rows=rows, columns=columns, dtype=dtype, batch_invariant=batch_invariant)
