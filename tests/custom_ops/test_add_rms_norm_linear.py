"""lamina::add_rms_norm_linear: what the ops it stands for do one after another."""

from typing import Any

import pytest
import torch

from lamina.common.errors import ShapeError
from lamina.custom_ops import add_rms_norm, add_rms_norm_linear, linear, silu_and_mul
from lamina.custom_ops.add_rms_norm_linear import _composed

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def make_arguments(
    dtype: torch.dtype = torch.float32, *, num_tokens: int = 5, with_bias: bool = False, gated: bool = False
) -> dict[str, Any]:
    x, residual = ((torch.randn(num_tokens, 32) * 3).to(dtype) for _ in range(2))
    return {
        "x": x,
        "residual": residual,
        "norm_weight": torch.randn(32).to(dtype),
        "eps": 1e-5,
        "weight": torch.randn(12, 32).to(dtype),
        "bias": torch.randn(12).to(dtype) if with_bias else None,
        "silu_and_mul": gated,
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_it_has_the_bits_of_the_ops_one_after_another(
    dtype: torch.dtype, num_tokens: int, with_bias: bool, gated: bool
) -> None:
    arguments = make_arguments(dtype, num_tokens=num_tokens, with_bias=with_bias, gated=gated)
    out, total = add_rms_norm_linear(**arguments)
    normed, expected_total = add_rms_norm(
        *(arguments[name] for name in ("x", "residual", "norm_weight", "eps"))
    )
    expected = linear(normed, arguments["weight"], arguments["bias"])
    assert torch.equal(total, expected_total)
    assert torch.equal(out, silu_and_mul(expected) if gated else expected)
    composed = _composed.add_rms_norm_linear(*arguments.values())
    assert torch.equal(composed[0], out)
    assert torch.equal(composed[1], total)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_opcheck(with_bias: bool, gated: bool) -> None:
    arguments = tuple(make_arguments(torch.bfloat16, with_bias=with_bias, gated=gated).values())
    torch.library.opcheck(torch.ops.lamina.add_rms_norm_linear.default, arguments)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"weight": torch.zeros(12, 31)}, r"x is \[5, 32\], weight \[12, 31\]"),
        ({"residual": torch.zeros(5, 31)}, r"residual is \[5, 31\], norm_weight \[32\]; wanted \[5, 32\]"),
        ({"norm_weight": torch.zeros(31)}, r"norm_weight \[31\]; wanted \[5, 32\] and \[32\]"),
        ({"bias": torch.zeros(11)}, r"bias is \[11\]; wanted \[12\]"),
        ({"weight": torch.zeros(11, 32), "silu_and_mul": True}, "wanted as many rows of gate as up"),
        (
            {"weight": torch.zeros(12, 32).half()},
            r"torch\.float32, torch\.float32, torch\.float16; wanted x's",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        add_rms_norm_linear(**make_arguments() | change)
