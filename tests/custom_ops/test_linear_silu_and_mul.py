"""lamina::linear_silu_and_mul."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from lamina.common.errors import ShapeError
from lamina.custom_ops import linear, linear_silu_and_mul
from lamina.custom_ops._shared import registry


@given(
    tokens=st.integers(0, 5),
    columns=st.integers(1, 40),
    width=st.integers(1, 30),
    biased=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
)
def test_projection_and_gate_are_rounded_one_after_another(
    tokens: int, columns: int, width: int, biased: bool, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(tokens, columns).to(dtype), torch.randn(2 * width, columns).to(dtype)
    bias = torch.randn(2 * width).to(dtype) if biased else None
    gate, up = linear(x, weight, bias).chunk(2, dim=1)
    assert torch.equal(linear_silu_and_mul(x, weight, bias), F.silu(gate) * up)


def test_every_provider_here_gives_the_formula_and_torch_knows_the_op() -> None:
    x, weight, bias = torch.randn(3, 8), torch.randn(10, 8), torch.randn(10)
    formula = F.silu(F.linear(x, weight, bias)[:, :5]) * F.linear(x, weight, bias)[:, 5:]
    for name in ("composed", "reference"):
        select = registry.select("linear_silu_and_mul", device=x.device, dtype=x.dtype, provider=name)
        torch.testing.assert_close(select.call(x, weight, bias), formula)
    for arguments in ((x, weight), (x, weight, bias), (x, weight, None, True)):
        torch.library.opcheck(torch.ops.lamina.linear_silu_and_mul.default, arguments)


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        (torch.zeros(9, 8), None, "as much gate as up"),
        (torch.zeros(10, 7), None, r"x is \[3, 8\], weight \[10, 7\]"),
        (torch.zeros(10, 8), torch.zeros(9), r"bias is \[9\]; wanted \[10\]"),
        (torch.zeros(10, 8).half(), None, "wanted one dtype"),
    ],
)
def test_what_does_not_fit_is_refused(weight: torch.Tensor, bias: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        linear_silu_and_mul(torch.zeros(3, 8), weight, bias)
