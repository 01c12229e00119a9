"""lamina::gelu_and_mul."""

import pytest
import torch
import torch.nn.functional as F

from lamina.common.errors import ShapeError
from lamina.custom_ops import gelu_and_mul


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gelu_is_rounded_before_the_product(dtype: torch.dtype) -> None:
    gate_up = (torch.randn(5, 64) * 3).to(dtype)
    gate, up = gate_up[:, :32], gate_up[:, 32:]
    assert torch.equal(gelu_and_mul(gate_up), F.gelu(gate, approximate="tanh") * up)
    torch.library.opcheck(torch.ops.lamina.gelu_and_mul.default, (gate_up,))


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ShapeError, match="even last dimension"):
        gelu_and_mul(torch.zeros(3, 7))
