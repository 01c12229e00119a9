"""Operands in one byte, and what a float32 sum may be off."""

import pytest
import torch
from torch import Tensor

from lamina.custom_ops._shared.fp8 import FP8
from lamina.custom_ops._shared.quantized import INT8, LARGEST, num_groups

# torch's own check of what is written compares arguments, which it cannot in FP8
CHECKS = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
SUM_ERROR = 2e-6  # of a sum of float32, by the sum of its terms' sizes


# formats, and whether rows have scales of groups
KINDS = [pytest.param(FP8, False, id="fp8"), pytest.param(FP8, True, id="fp8_block")]
KINDS.append(pytest.param(INT8, False, id="int8"))
every_kind = pytest.mark.parametrize("dtype, grouped", KINDS)


def weights(
    rows: int, columns: int, *, grouped: bool, seed: int = 0, dtype: torch.dtype = FP8
) -> tuple[Tensor, Tensor]:
    """Weights of all sizes that a format has, and their scales."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(rows, columns, generator=generator) * 2.0 ** torch.randint(
        -4, 7, (rows, 1), generator=generator
    )
    largest = LARGEST[dtype]
    weight = sizes.clamp(-largest, largest).to(dtype)
    shape = (rows, num_groups(columns)) if grouped else (rows,)
    return weight, torch.rand(shape, generator=generator) * 0.01 + 1e-3


def absolute(part: Tensor) -> Tensor:
    """Sizes without signs, in the same dtype."""
    return part.float().abs().to(part.dtype)


def apart(x: Tensor) -> Tensor:
    """The same rows, further apart, with NaN between them."""
    wide = torch.full((x.shape[0], x.shape[1] + 16), torch.nan, dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def check(result: Tensor, exact: Tensor, sizes: Tensor, sum_error: float = SUM_ERROR) -> None:
    """Rounded once from a sum that is as good as sums in float32 are; sizes: of terms without their signs."""
    info = torch.finfo(result.dtype)
    allowed = exact.abs() * info.eps / 2 + info.tiny * info.eps / 2 + sizes * sum_error
    assert ((result.double() - exact).abs() <= allowed).all()
