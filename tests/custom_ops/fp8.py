"""Operands of the FP8 ops, and what a float32 sum may be off."""

import torch
from torch import Tensor

from lamina.custom_ops._shared.fp8 import FP8, num_groups

# torch's own check of what is written compares arguments, which it cannot in FP8
CHECKS = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
SUM_ERROR = 2e-6  # of a sum of float32, by the sum of its terms' sizes


def weights(rows: int, columns: int, *, grouped: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights of all sizes that FP8 has, and their scales."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(rows, columns, generator=generator) * 2.0 ** torch.randint(
        -4, 7, (rows, 1), generator=generator
    )
    weight = sizes.clamp(-448, 448).to(FP8)
    shape = (rows, num_groups(columns)) if grouped else (rows,)
    return weight, torch.rand(shape, generator=generator) * 0.01 + 1e-3


def apart(x: Tensor) -> Tensor:
    """The same rows, further apart, with NaN between them."""
    wide = torch.full((x.shape[0], x.shape[1] + 16), torch.nan, dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def check(result: Tensor, exact: Tensor, sizes: Tensor) -> None:
    """Rounded once from a sum that is as good as sums in float32 are; sizes: of terms without their signs."""
    info = torch.finfo(result.dtype)
    allowed = exact.abs() * info.eps / 2 + info.tiny * info.eps / 2 + sizes * SUM_ERROR
    assert ((result.double() - exact).abs() <= allowed).all()
