"""lamina::quantize_rows, activations in FP8 with a scale a row or a group of columns."""

import torch
from torch import Tensor

from .._shared.cuda_kernel import DTYPES
from .._shared.fp8 import check_group, check_rows, new_quantized
from .._shared.library import define_op
from .._shared.registry import Provider
from .._shared.triton_provider import triton_provider
from . import _cuda, reference


def quantize_rows(
    x: Tensor,  # [num_tokens, columns]
    group: int,  # columns that share a scale: 128; 0: all of a row
) -> tuple[Tensor, Tensor]:
    """(q, s): q float8_e4m3fn [num_tokens, columns], s float32 [num_tokens] or [num_tokens, columns / 128].

    s = max(|x|) / 448 in float32, of which the maximum is at least float32's smallest normal number, and
    q = x / s, clamped to ±448 and rounded to the nearest even. Scales of groups have strides (1, num_tokens).
    """
    result: tuple[Tensor, Tensor] = torch.ops.lamina.quantize_rows.default(x, group)
    return result


def _fake(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    return new_quantized(x, x.shape[1], group)


def _check(x: Tensor, group: int) -> None:
    check_rows("quantize_rows", "x", x)
    check_group("quantize_rows", group)


define_op(
    "quantize_rows(Tensor x, int group) -> (Tensor, Tensor)",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        triton_provider("quantize_rows", dtypes=frozenset(DTYPES)),
        Provider(name="reference", load=lambda: reference.quantize_rows),
    ),
)
