"""lamina::add_zero_centred_rms_norm."""

import pytest
import torch

from lamina.common.errors import ShapeError
from lamina.custom_ops import add_zero_centred_rms_norm, zero_centred_rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_it_is_the_rounded_sum_and_its_norm(dtype: torch.dtype) -> None:
    x, residual = ((torch.randn(5, 32) * 3).to(dtype) for _ in range(2))
    weight = torch.randn(32).to(dtype)
    normed, total = add_zero_centred_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, zero_centred_rms_norm(total, weight, 1e-5))
    for unrounded in ((), (True,)):
        arguments = (x, residual, weight, 1e-5, *unrounded)
        torch.library.opcheck(torch.ops.lamina.add_zero_centred_rms_norm.default, arguments)


def test_unrounded_the_norm_is_of_the_sum_in_float32() -> None:
    x, residual = (torch.randn(64, 32).bfloat16() for _ in range(2))
    weight = torch.randn(32).bfloat16()
    normed, total = add_zero_centred_rms_norm(x, residual, weight, 1e-5, True)
    assert torch.equal(total, x + residual)
    wide = zero_centred_rms_norm(x.float() + residual.float(), weight.float(), 1e-5)
    assert torch.equal(normed, wide.bfloat16())
    assert not torch.equal(normed, zero_centred_rms_norm(total, weight, 1e-5))


def test_a_residual_that_does_not_fit_is_named() -> None:
    with pytest.raises(ShapeError, match=r"add_zero_centred_rms_norm: residual is \[3, 9\]"):
        add_zero_centred_rms_norm(torch.zeros(3, 8), torch.zeros(3, 9), torch.zeros(8), 1e-5)
