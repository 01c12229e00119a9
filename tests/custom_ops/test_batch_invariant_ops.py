"""Ops that are told to be batch-invariant: a row's bits do not depend on the rows beside it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamina import custom_ops
from lamina.common.errors import UnsupportedError
from lamina.custom_ops._shared import registry
from lamina.custom_ops.paged_attention.phases import select_batch_invariant

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROWS = (1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 64, 65, 100, 513)
WIDTHS = ((48, 64), (33, 100), (320, 96), (130, 577))  # rows and columns of weights
LIMITS = ({}, {"window": 5}, {"window": 40}, {"chunk": 24}, {"soft_cap": 3.0}, {"window": 9, "soft_cap": 2.0})


def random(*shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def same_bits(left, right):
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return torch.equal(left.contiguous().view(kind), right.contiguous().view(kind))


@given(
    st.sampled_from(DTYPES), st.sampled_from(WIDTHS), st.sampled_from(ROWS), st.booleans(), st.integers(0, 9)
)
def test_rows_of_a_gemm_have_the_bits_they_have_alone(dtype, shape, num_rows, has_bias, seed):
    n, k = shape
    x, weight = random(num_rows, k, dtype=dtype, seed=seed), random(n, k, dtype=dtype, seed=seed + 1)
    bias = random(n, dtype=dtype, seed=seed + 2) if has_bias else None
    together = custom_ops.linear(x, weight, bias, batch_invariant=True)
    for row in {0, num_rows // 2, num_rows - 1}:
        assert same_bits(together[row : row + 1], custom_ops.linear(x[row : row + 1], weight, bias, True))
    first = num_rows // 3
    assert same_bits(together[first:], custom_ops.linear(x[first:], weight, bias, True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_invariant_gemm_is_a_gemm(dtype):
    x, weight, bias = (random(*shape, dtype=dtype, seed=0) for shape in ((40, 577), (130, 577), (130,)))
    right = x.double() @ weight.double().T + bias.double()
    found = custom_ops.linear(x, weight, bias, batch_invariant=True)
    torch.testing.assert_close(found.double(), right, rtol=4 * torch.finfo(dtype).eps, atol=1e-4)
    laid_out_otherwise = custom_ops.linear(x, weight.T.contiguous().T, bias, batch_invariant=True)
    torch.testing.assert_close(found, laid_out_otherwise)
    assert custom_ops.linear(x[:0], weight, bias, batch_invariant=True).shape == (0, 130)


def test_without_the_mode_rows_of_a_gemm_have_other_bits_among_many():
    x, weight = random(300, 577, dtype=torch.float32, seed=0), random(130, 577, dtype=torch.float32, seed=1)
    together, alone = custom_ops.linear(x, weight), [custom_ops.linear(row, weight) for row in x.split(1)]
    assert not same_bits(together, torch.cat(alone))


@given(st.sampled_from(DTYPES), st.sampled_from(ROWS), st.booleans(), st.integers(0, 9))
def test_rows_of_a_fused_gemm_have_the_bits_they_have_alone(dtype, num_rows, is_gated, seed):
    x, residual = (random(num_rows, 96, dtype=dtype, seed=seed + s) for s in (0, 1))
    norm, weight = random(96, dtype=dtype, seed=seed + 2), random(66, 96, dtype=dtype, seed=seed + 3)

    def run(rows):
        return custom_ops.add_rms_norm_linear(
            x[rows], residual[rows], norm, 1e-5, weight, None, is_gated, None, batch_invariant=True
        )

    together = run(slice(None))
    for row in {0, num_rows // 2, num_rows - 1}:
        rows = slice(row, row + 1)
        for whole, one in zip(together, run(rows), strict=True):
            assert same_bits(whole[rows], one)


class Cache:
    """Keys and values of some sequences in blocks that lie apart, and attention of parts of them."""

    def __init__(self, lens, dtype, seed, heads=4, kv_heads=2, dim=16, block_size=16):
        self.lens, self.query = (
            lens,
            [random(n, heads, dim, dtype=dtype, seed=seed + 7 * i) for i, n in enumerate(lens)],
        )
        per_seq = -(-max(lens) // block_size)
        self.keys, self.values = (
            random(1 + per_seq * len(lens), block_size, kv_heads, dim, dtype=dtype, seed=seed + s)
            for s in (1, 2)
        )
        order = torch.randperm(per_seq * len(lens), generator=torch.Generator().manual_seed(seed))
        self.tables = (1 + order).view(len(lens), per_seq).to(torch.int32)

    def attend(self, parts, window=-1, chunk=-1, soft_cap=0.0):
        """Rows first to last of each named sequence, all in one call."""
        query = torch.cat([self.query[seq][first:last] for seq, first, last in parts])
        ends = [last for _, _, last in parts]
        starts = torch.tensor([0, *[last - first for _, first, last in parts]]).cumsum(0).to(torch.int32)
        out = torch.empty_like(query)
        custom_ops.paged_attention(
            *(out, query, self.keys, self.values, self.tables[[seq for seq, _, _ in parts]]),
            *(torch.tensor(ends, dtype=torch.int32), starts, max(last - first for _, first, last in parts)),
            *(0.25, window, chunk, soft_cap, 1.0, 1.0, True),
        )
        return out.split([last - first for _, first, last in parts])


@given(st.data())
def test_rows_of_attention_have_the_bits_they_have_alone_whatever_the_chunks(data):
    """Also where splits of keys meet, with windows that begin within a block, and beside others."""
    dtype = data.draw(st.sampled_from(DTYPES))
    lens = data.draw(st.lists(st.sampled_from((1, 5, 17, 64, 100, 257, 300)), min_size=1, max_size=4))
    limits = data.draw(st.sampled_from(LIMITS))
    cache = Cache(lens, dtype, data.draw(st.integers(0, 9)))
    length = lens[0]
    (whole,) = cache.attend([(0, 0, length)], **limits)
    row = data.draw(st.integers(0, length - 1))
    (alone,) = cache.attend([(0, row, row + 1)], **limits)
    assert same_bits(whole[row : row + 1], alone)
    first = data.draw(st.integers(0, row))
    others = [(seq, data.draw(st.integers(0, n - 1)), n) for seq, n in enumerate(lens) if seq]
    place = data.draw(st.integers(0, len(others)))
    together = cache.attend([*others[:place], (0, first, row + 1), *others[place:]], **limits)
    assert same_bits(together[place], whole[first : row + 1])


def test_providers_whose_bits_depend_on_the_batch_are_refused_by_name():
    shape = {"device": CPU, "dtype": torch.float32, "head_dim": 16, "block_size": 16}
    for name in ("triton", "flash_attn"):
        with pytest.raises(UnsupportedError, match=f"attention is '{name}' and batch_invariant True"):
            select_batch_invariant(name, **shape)
    assert select_batch_invariant("auto", **shape).name == "cpu"
    assert select_batch_invariant("reference", **shape).name == "reference"


def test_the_formulas_are_batch_invariant_too():
    x, weight = random(40, 577, dtype=torch.float32, seed=0), random(130, 577, dtype=torch.float32, seed=1)
    linear = registry.select("linear", device=CPU, dtype=torch.float32, provider="reference").call
    whole = linear(x, weight, None, True)
    assert same_bits(whole[7:8], linear(x[7:8], weight, None, True))
    with registry.forced({"paged_attention": "reference"}):
        cache = Cache([100, 30], torch.float32, 0)
        (alone,) = cache.attend([(0, 41, 42)], window=30)
        assert same_bits(cache.attend([(1, 3, 30), (0, 17, 60)], window=30)[1][41 - 17 : 42 - 17], alone)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_logprobs_of_a_large_vocabulary_are_those_of_the_row_alone(dtype):
    logits, own = random(7, 50_000, dtype=dtype, seed=0), torch.arange(7, dtype=torch.int32)
    ids, logprobs, ranks = custom_ops.top_logprobs(logits, own, 49_999, 5)
    for row in range(7):
        rows = slice(row, row + 1)
        alone = custom_ops.top_logprobs(logits[rows], own[rows], 49_999, 5)
        assert torch.equal(alone[0], ids[rows])
        assert same_bits(alone[1], logprobs[rows])
        assert torch.equal(alone[2], ranks[rows])
