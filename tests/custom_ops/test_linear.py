"""lamina::linear."""

import pytest
import torch
import torch.nn.functional as F

from lamina.common.errors import ShapeError
from lamina.custom_ops import linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("with_bias", [False, True])
def test_it_is_torch_linear(dtype: torch.dtype, num_tokens: int, with_bias: bool) -> None:
    x, weight = torch.randn(num_tokens, 8).to(dtype), torch.randn(6, 8).to(dtype)
    bias = torch.randn(6).to(dtype) if with_bias else None
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    torch.library.opcheck(torch.ops.lamina.linear.default, (x, weight, bias))


@pytest.mark.parametrize(
    "weight,bias,message",
    [
        (torch.zeros(6, 7), None, r"x is \[3, 8\], weight \[6, 7\]"),
        (torch.zeros(6, 8).half(), None, "weight torch.float16"),
        (torch.zeros(6, 8), torch.zeros(5), r"bias is \[5\]; wanted \[6\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(weight: torch.Tensor, bias: torch.Tensor, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        linear(torch.zeros(3, 8), weight, bias)
