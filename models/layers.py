"""The operations a model is written in: formulas that a compiler fuses, or ops with fixed rounding."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import custom_ops
from ..custom_ops.add_rms_norm.reference import add_rms_norm
from ..custom_ops.add_zero_centred_rms_norm.reference import add_zero_centred_rms_norm
from ..custom_ops.gelu_and_mul.reference import gelu_and_mul
from ..custom_ops.layer_norm.reference import layer_norm
from ..custom_ops.rms_norm.reference import rms_norm
from ..custom_ops.silu_and_mul.reference import silu_and_mul
from ..custom_ops.zero_centred_rms_norm.reference import zero_centred_rms_norm

# (layer, query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, D], out [T, Hq, D] to be written in place)
Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]


SCALE = "%scale"  # behind a projection's name: the name of its scales, where it is quantized


class QuantizedWeight(NamedTuple):
    """A projection as lamina::linear_int8 takes it; nothing but Ops.linear may meet one."""

    values: Tensor  # [out, in] int8
    scale: Tensor  # [out] float32


class Linear(Protocol):
    """x [T, in] @ weight.T [in, out] + bias [out]"""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor: ...


class Ops(NamedTuple):
    """One implementation of every operation between attention calls; shapes and rounding as in custom_ops."""

    linear: Linear
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    rotary_embedding: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    gelu_and_mul: Callable[[Tensor], Tensor]
    zero_centred_rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_zero_centred_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    layer_norm: Callable[[Tensor, Tensor, Tensor | None, float], Tensor]


# What Inductor sees through and fuses; the rotation is named, since it may move into attention.
FAST_OPS = Ops(
    linear=F.linear,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    silu_and_mul=silu_and_mul,
    rotary_embedding=custom_ops.rotary_embedding,
    gelu_and_mul=gelu_and_mul,
    zero_centred_rms_norm=zero_centred_rms_norm,
    add_zero_centred_rms_norm=add_zero_centred_rms_norm,
    layer_norm=layer_norm,
)

# Each rounds where its formula says, compiled or not, so both give the same bits.
EXACT_OPS = Ops(
    linear=custom_ops.linear,
    rms_norm=custom_ops.rms_norm,
    add_rms_norm=custom_ops.add_rms_norm,
    silu_and_mul=custom_ops.silu_and_mul,
    rotary_embedding=custom_ops.rotary_embedding,
    gelu_and_mul=custom_ops.gelu_and_mul,
    zero_centred_rms_norm=custom_ops.zero_centred_rms_norm,
    add_zero_centred_rms_norm=custom_ops.add_zero_centred_rms_norm,
    layer_norm=custom_ops.layer_norm,
)


def join_scales(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Every weight by name as a model's forward takes them: those with scales as a QuantizedWeight."""
    named = [name.removesuffix(SCALE) for name in weights if name.endswith(SCALE)]
    scaled = [name for name in named if name in weights and weights[name].dtype == torch.int8]
    joined = {name: QuantizedWeight(weights[name], weights[name + SCALE]) for name in scaled}
    return {**weights, **cast(Mapping[str, Tensor], joined)}


def taking_quantized(ops: Ops) -> Ops:
    """The same ops, whose linear takes a QuantizedWeight too."""

    def linear(x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None = None, /) -> Tensor:
        if isinstance(weight, QuantizedWeight):
            return custom_ops.linear_int8(x, weight.values, weight.scale, bias)
        return ops.linear(x, weight, bias)

    return ops._replace(linear=linear)
