"""lamina::linear_blocks of rows in several kinds of blocks, as a GGUF file may have a fused projection."""

import itertools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import ShapeError
from lamina.custom_ops import linear_blocks
from lamina.custom_ops.linear_blocks import _cpu
from lamina.custom_ops.linear_blocks.layout import KINDS, interleave
from lamina.custom_ops.linear_blocks.runs import Run, name_of, runs_of, split

from .guarded import at_the_end, making_ended
from .test_linear_blocks import DTYPES, TOKENS, WAYS, blocks_of, check

# Rows that are whole groups of sixteen, and others; runs of one kind beside each other too.
RUNS = st.lists(
    st.builds(Run, st.sampled_from(sorted(KINDS)), st.sampled_from([1, 5, 15, 16, 17, 32, 48])),
    min_size=2,
    max_size=4,
).filter(lambda runs: len({run.kind for run in runs}) > 1)
Q4_K_M = (Run("Q4_K", 32), Run("Q4_K", 16), Run("Q6_K", 16))


def merged(runs: list[Run] | tuple[Run, ...]) -> tuple[Run, ...]:
    return runs_of(name_of(runs))


def weight_of(runs: tuple[Run, ...], columns: int) -> tuple[Tensor, str]:
    """Rows of any bits, laid out as the op wants them, and the kind that it is given for them."""
    lying = [
        interleave(blocks_of(kind, num_rows, columns, seed), kind)
        for seed, (kind, num_rows) in enumerate(merged(runs))
    ]
    return torch.cat([rows.flatten() for rows in lying]), name_of(runs)


def x_of(num_tokens: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_tokens, columns, generator=torch.Generator().manual_seed(1)).to(dtype)


def bias_of(runs: tuple[Run, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(sum(run.num_rows for run in runs)).to(dtype)


@pytest.mark.parametrize("way", WAYS)
@given(
    runs=RUNS.map(tuple),
    num_tokens=TOKENS,
    dtype=st.sampled_from(DTYPES),
    columns=st.sampled_from([256, 768]),
    bias=st.booleans(),
)
def test_rows_of_each_kind_are_their_product_with_the_weights_that_gguf_dequantizes(
    way: str, runs: tuple[Run, ...], num_tokens: int, dtype: torch.dtype, columns: int, bias: bool
) -> None:
    weight, name = weight_of(runs, columns)
    x, biases = x_of(num_tokens, columns, dtype), bias_of(runs, dtype) if bias else None
    result, first = WAYS[way](x, weight, biases, name), 0
    assert result.dtype == dtype
    assert result.is_contiguous()
    for kind, rows in split(weight, name):
        own = slice(first, first + rows.shape[0])
        check(result[:, own], (x, rows, None if biases is None else biases[own], kind))
        first = own.stop
    assert result.shape == (num_tokens, first)


@given(runs=RUNS.map(tuple), num_tokens=TOKENS, dtype=st.sampled_from(DTYPES))
def test_each_row_has_the_bits_that_it_has_among_its_own_kind(
    runs: tuple[Run, ...], num_tokens: int, dtype: torch.dtype
) -> None:
    weight, name = weight_of(runs, 256)
    x = x_of(num_tokens, 256, dtype)
    apart = [linear_blocks(x, rows, None, kind) for kind, rows in split(weight, name)]
    together = linear_blocks(x, weight, None, name)
    assert torch.equal(together, torch.cat(apart, dim=1))
    assert torch.equal(linear_blocks(x[-1:], weight, None, name), together[-1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate", [(Run("Q4_K", 32), Run("Q8_0", 16)), (Run("Q4_K", 48),), (Run("Q4_K", 40),)])
def test_a_gate_may_be_in_another_kind_than_what_it_gates(gate: tuple[Run, ...], dtype: torch.dtype) -> None:
    """Where a run ends amid a group too; but for what an ulp of exp does to float32."""
    weight, name = weight_of((*gate, Run("Q6_K", sum(run.num_rows for run in gate))), 256)
    for num_tokens in (1, 20):
        x = x_of(num_tokens, 256, dtype)
        both = torch.ops.lamina.silu_and_mul.default(linear_blocks(x, weight, None, name))
        found = linear_blocks(x, weight, None, name, True)
        torch.testing.assert_close(found, both, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_are_the_same_on_any_number_of_threads(threads: int) -> None:
    weight, name = weight_of((Run("Q4_K", 500), Run("Q6_K", 100), Run("Q8_0", 77)), 1024)
    x, before = x_of(9, 1024, torch.bfloat16), torch.get_num_threads()
    first = linear_blocks(x, weight, None, name)
    try:
        torch.set_num_threads(threads)
        assert all(torch.equal(linear_blocks(x, weight, None, name), first) for _ in range(3))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("last", KINDS)
@pytest.mark.parametrize("num_rows", [5, 16, 33])
def test_nothing_is_read_beyond_its_end(last: str, num_rows: int) -> None:
    first = "Q6_K" if last == "Q4_K" else "Q4_K"
    weight, name = weight_of((Run(first, 17), Run(last, num_rows)), 256)
    bias = bias_of(runs_of(name), torch.bfloat16)
    for num_tokens in (1, 10):
        x = x_of(num_tokens, 256, torch.bfloat16)
        found = _cpu.linear_blocks(making_ended(x), at_the_end(weight), at_the_end(bias), name)
        assert torch.equal(found, linear_blocks(x, weight, bias, name))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_opcheck(dtype: torch.dtype, num_tokens: int) -> None:
    weight, name = weight_of(Q4_K_M, 256)
    for rest in ((bias_of(Q4_K_M, dtype), name), (None, name, True)):
        torch.library.opcheck(
            torch.ops.lamina.linear_blocks.default, (x_of(num_tokens, 256, dtype), weight, *rest)
        )


@given(runs=RUNS)
def test_a_name_says_runs_of_which_no_two_neighbours_are_alike(runs: list[Run]) -> None:
    said = merged(runs)
    assert name_of(said) == name_of(runs)
    assert [run.kind for run in said for _ in range(run.num_rows)] == [
        run.kind for run in runs for _ in range(run.num_rows)
    ]
    assert all(one.kind != other.kind for one, other in itertools.pairwise(said))


@pytest.mark.parametrize(
    "name",
    ["", "Q5_0", "Q4_K:16", "Q4_K:0+Q6_K:16", "Q4_K:16+Q5_K:16", "Q4_K+Q6_K", "Q4_K:16+", "Q4_K:16+Q6_K:x"],
)
def test_a_name_that_says_no_rows_of_kinds_is_refused(name: str) -> None:
    weight, _ = weight_of(Q4_K_M, 256)
    with pytest.raises(ShapeError, match=rf"kind is '{re.escape(name)}'; wanted Q4_0, .* or rows of several"):
        linear_blocks(x_of(1, 256, torch.float32), weight, None, name)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(3, 128)}, r"x is \[3, 128\], .* blocks of 256 columns, and \[10272 \* in / 256\]"),
        ({"x": torch.zeros(3, 512)}, r"x is \[3, 512\], weight \[10272\]"),
        ({"weight": torch.zeros(10271, dtype=torch.uint8)}, r"weight \[10271\]; wanted"),
        ({"weight": torch.zeros(64, 144, dtype=torch.uint8)}, r"weight \[64, 144\]; wanted"),
        ({"weight": torch.zeros(10272)}, "weight is torch.float32; wanted torch.uint8"),
        ({"bias": torch.zeros(63)}, r"bias is torch.float32 \[63\]; wanted x's torch.float32 \[64\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, object], message: str) -> None:
    weight, name = weight_of(Q4_K_M, 256)
    fitting = {"x": x_of(3, 256, torch.float32), "weight": weight, "bias": None, "kind": name}
    with pytest.raises(ShapeError, match=message):
        linear_blocks(**fitting | change)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [-1, 5, 1 << 40])
def test_the_kernel_refuses_a_code_of_no_kind_and_leaves_the_result_alone(code: int) -> None:
    x, weight, out = torch.ones(1, 256), at_the_end(torch.zeros(1, dtype=torch.uint8)), torch.zeros(1, 32)
    runs = torch.tensor([3, 16, code, 16])
    addresses = x.data_ptr(), 256, weight.data_ptr(), 0, out.data_ptr(), runs.data_ptr()
    assert _cpu.find_kernel()(torch.float32, *addresses, 2, 1, 256, 0, 1) == 0
    assert not bool(out.any())
