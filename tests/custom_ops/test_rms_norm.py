"""lamina::rms_norm."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lamina.common.errors import ShapeError
from lamina.custom_ops import rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_it_has_the_bits_of_transformers(dtype: torch.dtype, eps: float) -> None:
    norm = LlamaRMSNorm(48, eps=eps).to(dtype)
    weight = torch.randn(48).to(dtype)
    norm.load_state_dict({"weight": weight})
    x = (torch.randn(7, 48) * 3).to(dtype)
    with torch.no_grad():
        assert torch.equal(rms_norm(x, weight, eps), norm(x))
    torch.library.opcheck(torch.ops.lamina.rms_norm.default, (x, weight, eps))


def test_float64_is_computed_in_float64() -> None:
    x = torch.randn(3, 16, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(rms_norm(x, torch.ones_like(x[0]), 1e-6), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("weight", [torch.zeros(7), torch.zeros(8).half()])
def test_a_weight_that_does_not_fit_is_named(weight: torch.Tensor) -> None:
    with pytest.raises(ShapeError, match="rms_norm: weight is"):
        rms_norm(torch.zeros(3, 8), weight, 1e-6)
