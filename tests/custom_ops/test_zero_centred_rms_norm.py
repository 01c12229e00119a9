"""lamina::zero_centred_rms_norm."""

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from lamina.common.errors import ShapeError
from lamina.custom_ops import zero_centred_rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 64), (5, 3, 64)], ids=str)
def test_it_is_the_norm_of_gemma(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = (torch.randn(*shape) * 3).to(dtype), (torch.randn(64) * 0.3).to(dtype)
    norm = Gemma2RMSNorm(64, eps=1e-5).to(dtype)
    norm.weight.data.copy_(weight)
    assert torch.equal(zero_centred_rms_norm(x, weight, 1e-5), norm(x).detach())
    torch.library.opcheck(torch.ops.lamina.zero_centred_rms_norm.default, (x, weight, 1e-5))


def test_the_factor_is_not_rounded_before_it_meets_the_unit_vector() -> None:
    """1 + 2⁻⁹ is no bfloat16, so a weight kept as 1 + w would be lost."""
    x, weight = torch.full((1, 4), 256.0, dtype=torch.bfloat16), torch.full((4,), 2.0**-9).bfloat16()
    doubled = zero_centred_rms_norm(x.double(), weight.double(), 0.0)
    assert doubled.tolist() == [[1 + 2.0**-9] * 4]
    assert zero_centred_rms_norm(x, weight + 2.0**-8, 0.0).tolist() == [[1.0078125] * 4]


def test_a_weight_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match="zero_centred_rms_norm: weight is"):
        zero_centred_rms_norm(torch.zeros(3, 8), torch.zeros(7), 1e-5)
