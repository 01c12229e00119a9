"""The operations a model is written in: formulas that a compiler fuses, or ops with fixed rounding."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

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
    # Rows of a table [rows, H] by ids [T] int32: [T, H].
    embedding: Callable[[Tensor, Tensor], Tensor] = F.embedding
    # Shown the sum [T, H] that each layer begins with, by its number, and the one that the final norm takes.
    show_residual: Callable[[int, Tensor], None] = lambda layer, residual: None


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
