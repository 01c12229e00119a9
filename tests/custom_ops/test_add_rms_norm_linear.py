"""lamina::add_rms_norm_linear: what the ops it stands for do one after another."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import ShapeError
from lamina.custom_ops import add_rms_norm, add_rms_norm_linear, linear, silu_and_mul
from lamina.custom_ops._shared.registry import select
from lamina.custom_ops.add_rms_norm import reference as add_rms_norm_reference
from lamina.custom_ops.add_rms_norm_linear import _composed, _cpu, reference
from lamina.custom_ops.linear._cpu import methods as linear_methods
from lamina.custom_ops.linear.choices import Method

from .guarded import at_the_end, making_ended

CPU = torch.device("cpu")
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
def test_formula_and_composition_have_the_bits_of_the_ops_one_after_another(
    dtype: torch.dtype, num_tokens: int, with_bias: bool, gated: bool
) -> None:
    arguments = make_arguments(dtype, num_tokens=num_tokens, with_bias=with_bias, gated=gated)
    norm = (arguments[name] for name in ("x", "residual", "norm_weight", "eps"))
    normed, expected_total = add_rms_norm(*norm)
    for call, projection in (
        (_composed.add_rms_norm_linear, linear),
        (reference.add_rms_norm_linear, F.linear),
    ):
        out, total = call(*arguments.values())
        expected = projection(normed, arguments["weight"], arguments["bias"])
        assert torch.equal(total, expected_total)
        assert torch.equal(out, silu_and_mul(expected) if gated else expected)


@given(
    num_tokens=st.integers(1, 80),
    hidden=st.integers(1, 100),
    rows=st.integers(1, 50),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    with_bias=st.booleans(),
    gated=st.booleans(),
    method=st.sampled_from(Method),
    is_strided=st.booleans(),
    in_bytes=st.booleans(),
)
def test_the_cpp_kernel_is_as_good_as_the_ops_one_after_another(
    assert_close_to_reference: Callable[..., None],
    num_tokens: int,
    hidden: int,
    rows: int,
    dtype: torch.dtype,
    with_bias: bool,
    gated: bool,
    method: Method,
    is_strided: bool,
    in_bytes: bool,
) -> None:
    assume(method in {Method.DOT, *linear_methods(dtype, 1)})
    generator = torch.Generator().manual_seed(hidden)

    def random(*shape: int) -> Tensor:
        values = torch.randn(*shape[:-1], shape[-1] + 3, generator=generator).to(dtype)[..., :-3]
        return values if is_strided else values.contiguous()

    arguments: dict[str, Any] = {
        "x": random(num_tokens, hidden) * 3,
        "residual": random(num_tokens, hidden),
        "norm_weight": random(hidden),
        "eps": 1e-5,
        "weight": random(2 * rows, hidden),
        "bias": random(2 * rows) if with_bias else None,
        "silu_and_mul": gated,
    }
    arguments["weight"] /= hidden**0.5
    if in_bytes:
        peak = arguments["weight"].float().abs().amax(dim=1) + 1e-6
        arguments["weight"] = (arguments["weight"].float() / peak[:, None] * 127).round().to(torch.int8)
        arguments["scale"] = peak / 127
    kept = ("scale", "weight") if in_bytes else ()
    wide = {
        name: x.double() if isinstance(x, Tensor) and name not in kept else x for name, x in arguments.items()
    }
    naive, expected_total = reference.add_rms_norm_linear(**arguments)
    out, total = _cpu.launch(**arguments, method=method)
    assert torch.equal(total, expected_total)
    assert_close_to_reference(out, reference.add_rms_norm_linear(**wide)[0], naive, floor=2e-5)
    provider = select("add_rms_norm_linear", device=CPU, dtype=dtype, provider="cpu").call
    torch.testing.assert_close(provider(*arguments.values())[1], total, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [1, 16, 40, 100])
def test_behind_the_norm_is_what_the_norm_alone_gives_bit_for_bit(dtype: torch.dtype, hidden: int) -> None:
    """A GEMM with the identity changes nothing: sum, norm and weight round where add_rms_norm does.

    Of whole numbers, whose squares add up to the same in any order.
    """
    x, residual = (torch.randint(-8, 9, (70, hidden + 3)).to(dtype)[:, :hidden] for _ in range(2))
    weight, identity = torch.randn(hidden).to(dtype), torch.eye(hidden).to(dtype)
    normed, total = add_rms_norm_reference.add_rms_norm(x, residual, weight, 1e-5)
    for method in {Method.DOT, *linear_methods(dtype, 1)}:
        out, kept = _cpu.launch(x, residual, weight, 1e-5, identity, None, False, method=method)
        assert torch.equal(kept, total)
        assert torch.equal(out, normed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_is_of_the_sum_as_it_is_kept(dtype: torch.dtype) -> None:
    """Of two numbers, whose squares add up to the same in any order."""
    generator = torch.Generator().manual_seed(3)
    x, residual = (torch.randn(300, 2, generator=generator).to(dtype) for _ in range(2))
    ones, identity = torch.ones(2).to(dtype), torch.eye(2).to(dtype)
    normed, total = add_rms_norm_reference.add_rms_norm(x, residual, ones, 1e-5)
    for method in {Method.DOT, *linear_methods(dtype, 1)}:
        out, kept = _cpu.launch(x, residual, ones, 1e-5, identity, None, False, method=method)
        assert torch.equal(kept, total)
        assert torch.equal(out, normed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gate_and_up_are_rounded_before_they_meet(dtype: torch.dtype) -> None:
    """A norm of one number is 1, so that the GEMM and its bias are one exact sum."""
    generator = torch.Generator().manual_seed(4)
    weight, bias = (torch.randn(4000, generator=generator).to(dtype) for _ in range(2))
    one = torch.ones(1, 1, dtype=dtype)
    out, _ = _cpu.launch(one, one, one[0], 0.0, weight.unsqueeze(1), bias, True, method=Method.DOT)
    gate, up = (weight.float() + bias.float()).to(dtype).chunk(2)
    right = F.silu(gate.double()).to(dtype).double() * up.double()
    is_rounded_once = out[0] == right.to(dtype)
    assert is_rounded_once.double().mean() > 0.99  # exp itself may be the one or the other neighbour


@pytest.mark.parametrize("rows,hidden", [(34, 40), (2, 1), (66, 33)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_is_read_beyond_its_end(dtype: torch.dtype, gated: bool, rows: int, hidden: int) -> None:
    shapes = (3, hidden), (3, hidden), (hidden,), (rows, hidden), (rows,)
    x, residual, norm_weight, weight, bias = (torch.randn(shape).to(dtype) for shape in shapes)
    small, scale = torch.randint(-127, 128, weight.shape, dtype=torch.int8), torch.rand(rows)
    for method, (kept, scales) in itertools.product(
        {Method.DOT, *linear_methods(dtype, 1)}, [(weight, None), (small, scale)]
    ):
        given = x, residual, norm_weight, 1e-5, kept, bias, gated, method, scales
        ended = [at_the_end(value) if isinstance(value, Tensor) else value for value in given]
        ended[0] = making_ended(x)
        assert all(map(torch.equal, _cpu.launch(*ended), _cpu.launch(*given)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_of_large_numbers_is_the_formulas(dtype: torch.dtype) -> None:
    """A norm of one number is 1 or -1, so that the projection is the weight."""
    edges = [0.0, -0.5, 5.0, -20.0, 90.0, -90.0, -104.0, 3e38, -3e38, torch.inf, torch.nan]
    weight = torch.tensor([*edges, *[1.0] * len(edges)]).to(dtype).unsqueeze(1)
    one = torch.ones(1, 1, dtype=dtype)
    arguments = (one, one, one[0], 0.0, weight, None, True)
    out, _ = _cpu.launch(*arguments, method=Method.DOT)
    torch.testing.assert_close(out, reference.add_rms_norm_linear(*arguments)[0], equal_nan=True)


def test_the_gates_exponential_errs_by_few_ulp_up_to_its_limit() -> None:
    """e^88 is a float; at -88 the gate is -88 / e^88 and not yet 0."""
    gate = torch.cat([torch.linspace(-88, 88, 40001), torch.tensor([-88.0])]).unsqueeze(1)
    one, up = torch.ones(1, 1), torch.ones_like(gate)
    arguments = (one, one, one[0], 0.0, torch.cat([gate, up]), None, True)
    out, _ = _cpu.launch(*arguments, method=Method.DOT)
    torch.testing.assert_close(out[0].double(), F.silu(gate[:, 0].double()), rtol=5e-7, atol=0)


BYTES = torch.ones(12, 32, dtype=torch.int8)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("change", [{}, {"weight": BYTES, "scale": torch.ones(12)}], ids=["dense", "bytes"])
def test_opcheck(with_bias: bool, gated: bool, change: dict[str, Any]) -> None:
    arguments = make_arguments(torch.bfloat16, with_bias=with_bias, gated=gated) | change
    torch.library.opcheck(torch.ops.lamina.add_rms_norm_linear.default, tuple(arguments.values()))


@pytest.mark.parametrize(
    "change,message",
    [
        ({"weight": torch.zeros(12, 31)}, r"x is \[5, 32\], weight \[12, 31\]"),
        ({"residual": torch.zeros(5, 31)}, r"residual is \[5, 31\], norm_weight \[32\]; wanted \[5, 32\]"),
        ({"norm_weight": torch.zeros(31)}, r"norm_weight \[31\]; wanted \[5, 32\] and \[32\]"),
        ({"bias": torch.zeros(11)}, r"bias is \[11\]; wanted \[12\]"),
        ({"weight": torch.zeros(11, 32), "silu_and_mul": True}, "wanted as many rows of gate as up"),
        ({"weight": BYTES, "scale": torch.ones(11)}, r"scale torch\.float32 \[11\]; wanted torch\.int8"),
        ({"scale": torch.ones(12)}, r"weight is torch\.float32, scale.*wanted torch\.int8"),
        (
            {"weight": torch.zeros(12, 32).half()},
            r"torch\.float32, torch\.float32, torch\.float16; wanted x's",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        add_rms_norm_linear(**make_arguments() | change)
