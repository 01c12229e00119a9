"""lamina::quantize_rows, activations in one byte each, with a scale a row or a group of columns."""

import torch
from torch import Tensor

from .._shared.cuda_kernel import DTYPES
from .._shared.library import define_op
from .._shared.quantized import check_format, check_rows, new_quantized
from .._shared.registry import Provider
from .._shared.triton_provider import triton_provider
from . import _cuda, reference


def quantize_rows(
    x: Tensor,  # [num_tokens, columns]
    group: int,  # columns that share a scale: 128, in FP8 alone; 0: all of a row
    dtype: torch.dtype,  # float8_e4m3fn or int8
) -> tuple[Tensor, Tensor]:
    """(q, s): q of dtype [num_tokens, columns], s float32 [num_tokens] or [num_tokens, columns / 128].

    s = max(|x|) / largest in float32, of which the maximum is at least float32's smallest normal number and
    largest 448 or 127, and q = x / s, clamped to ±largest and rounded to the nearest, ties to even. Where x
    is no number, int8 has 0, times a scale that is none. Scales of groups have strides (1, num_tokens).
    """
    result: tuple[Tensor, Tensor] = torch.ops.lamina.quantize_rows.default(x, group, dtype)
    return result


def _fake(x: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return new_quantized(x, x.shape[1], group, dtype)


def _check(x: Tensor, group: int, dtype: torch.dtype) -> None:
    check_rows("quantize_rows", "x", x)
    check_format("quantize_rows", group, dtype)


define_op(
    "quantize_rows(Tensor x, int group, ScalarType dtype) -> (Tensor, Tensor)",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        triton_provider("quantize_rows", dtypes=frozenset(DTYPES)),
        Provider(name="reference", load=lambda: reference.quantize_rows),
    ),
)
