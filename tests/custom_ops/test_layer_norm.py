"""lamina::layer_norm."""

import pytest
import torch

from lamina.common.errors import ShapeError
from lamina.custom_ops import layer_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 64), (5, 3, 64)], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_it_is_torchs_own_layer_norm(dtype: torch.dtype, shape: tuple[int, ...], has_bias: bool) -> None:
    x, weight = (torch.randn(*shape) * 3 + 1).to(dtype), torch.randn(64).to(dtype)
    bias = torch.randn(64).to(dtype) if has_bias else None
    norm = torch.nn.LayerNorm(64, eps=1e-5, bias=has_bias, dtype=dtype)
    norm.weight.data.copy_(weight)
    if bias is not None:
        norm.bias.data.copy_(bias)
    assert torch.equal(layer_norm(x, weight, bias, 1e-5), norm(x).detach())
    torch.library.opcheck(torch.ops.lamina.layer_norm.default, (x, weight, bias, 1e-5))


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(3, 8)
    with pytest.raises(ShapeError, match="layer_norm: weight is"):
        layer_norm(x, torch.zeros(7), None, 1e-5)
    with pytest.raises(ShapeError, match=r"layer_norm: bias is \[7\]"):
        layer_norm(x, torch.zeros(8), torch.zeros(7), 1e-5)
