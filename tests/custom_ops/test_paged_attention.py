"""lamina::paged_attention: the kernel against the formula, and what a row may depend on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from lamina.common.errors import ShapeError
from lamina.custom_ops._shared.fp8 import FP8
from lamina.custom_ops._shared.registry import select
from lamina.custom_ops.paged_attention import reference

from .guarded import at_the_end

MakeCase = Callable[..., Any]

CPU = torch.device("cpu")
SCALED = {"cache_dtype": FP8, "key_scale": 0.03, "value_scale": 2.5}
CACHES = [{}, {}, {"cache_dtype": FP8}, SCALED, {"cache_dtype": torch.int8}]  # {}: like queries

every_cache = pytest.mark.parametrize("cache", CACHES[1:], ids=str)


def kernel(case: Any) -> torch.Tensor:
    """What the C++ kernel writes."""
    select("paged_attention", device=CPU, dtype=case.query.dtype, provider="cpu").call(*case)
    return case.out


def formula(case: Any, dtype: torch.dtype) -> torch.Tensor:
    """What the reference writes, computed in the given dtype."""
    case = case.to(dtype)
    reference.paged_attention(*case)
    return case.out


def rounding_of_scores(case: Any) -> float:
    """What float32 may be off: a weight errs by the rounding of its score, and of the largest one."""
    query, key, value = (
        torch.nan_to_num(part.double(), 0, 0, 0) for part in (case.query, case.key_cache, case.value_cache)
    )
    score = abs(case.scale) * query.norm(dim=-1).max() * key.norm(dim=-1).max()
    return float(score * torch.finfo(torch.float32).eps / 2 * value.abs().max())


@st.composite
def batches(draw: st.DrawFn, *, max_len: int = 90) -> dict[str, Any]:
    """Mixed batches of decode, chunked and full prefill, and padding, over every kind of shape."""
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    lens = draw(st.lists(st.integers(0, max_len), min_size=1, max_size=4))
    kinds = draw(
        st.lists(st.sampled_from(["decode", "chunk", "full"]), min_size=len(lens), max_size=len(lens))
    )
    queries = {"decode": lambda n: min(n, 1), "chunk": lambda n: (n + 1) // 2, "full": lambda n: n}
    return {
        "seq_lens": lens,
        "query_lens": [queries[kind](length) for kind, length in zip(kinds, lens, strict=True)],
        "num_heads": kv_heads * draw(st.sampled_from([1, 2, 3, 4, 7, 16])),
        "num_kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from([16, 20, 64, 80, 96, 128, 256])),
        "block_size": draw(st.sampled_from([4, 7, 16, 64, 256])),
        "window": draw(st.sampled_from([-1, -1, 1, 5, 64, 1000])),
        "chunk": draw(st.sampled_from([-1, -1, 1, 7, 64, 1000])),
        "soft_cap": draw(st.sampled_from([0.0, 0.0, 2.0, 30.0])),
        "seed": draw(st.integers(0, 1000)),
        **draw(st.sampled_from(CACHES)),
    }


@given(batches(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_kernel_errs_no_more_than_twice_the_plain_formula(
    make_paged_case: MakeCase, assert_close_to_reference: Callable[..., None], batch: Any, dtype: torch.dtype
) -> None:
    case = make_paged_case(**batch, dtype=dtype)
    if case.query.shape[0] == 0:
        return
    exact = formula(case, torch.float64)
    naive = formula(case, dtype)
    assert_close_to_reference(kernel(case), exact, naive, floor=max(4e-6, rounding_of_scores(case)))


@pytest.mark.parametrize("length", [255, 256, 257, 511, 512, 513, 1100])
def test_long_contexts_are_joined_from_their_splits(
    make_paged_case: MakeCase, assert_close_to_reference: Callable[..., None], length: int
) -> None:
    case = make_paged_case([length, length], [1, min(length, 40)], num_heads=6, block_size=16)
    exact = formula(case, torch.float64)
    assert_close_to_reference(kernel(case), exact, formula(case, torch.float32), floor=4e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("query_len", [1, 4])
def test_more_key_value_heads_than_are_attended_to_at_once(
    make_paged_case: MakeCase,
    assert_close_to_reference: Callable[..., None],
    query_len: int,
    dtype: torch.dtype,
) -> None:
    case = make_paged_case(
        [1200, 40], [query_len] * 2, num_heads=72, num_kv_heads=18, head_dim=64, block_size=16, dtype=dtype
    )
    exact = formula(case, torch.float64)
    naive = formula(case, dtype)
    assert_close_to_reference(kernel(case), exact, naive, floor=max(4e-6, rounding_of_scores(case)))


@pytest.mark.parametrize(
    "shape",
    [
        {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
        {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "window": 70},
        {"num_heads": 4, "num_kv_heads": 4, "head_dim": 96, "soft_cap": 20.0},
        {"num_heads": 4, "num_kv_heads": 1, "head_dim": 32, "window": 33, "block_size": 7},
        {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "chunk": 50},
    ],
)
@pytest.mark.parametrize("length,chunk", [(300, 300), (270, 97), (65, 17)])
def test_long_prompts_in_bfloat16_err_no_more_than_twice_the_plain_formula(
    make_paged_case: MakeCase,
    assert_close_to_reference: Callable[..., None],
    shape: dict[str, Any],
    length: int,
    chunk: int,
) -> None:
    """Enough rows for whatever the CPU has for many: AMX, if any."""
    case = make_paged_case([length, 40], [chunk, 1], **{"block_size": 16} | shape, dtype=torch.bfloat16)
    exact = formula(case, torch.float64)
    assert_close_to_reference(kernel(case), exact, formula(case, torch.bfloat16), floor=4e-6)


def rounded_once(case: Any) -> None:
    """The kernel's results: rounded from sums whose weights hold 16 bits, of int8 whose queries do."""
    exact = formula(case, torch.float64)
    wide = case.to(torch.float64)
    sizes = formula(wide._replace(value_cache=wide.value_cache.abs()), torch.float64)
    out = kernel(case).double()
    by_bytes = case.key_cache.dtype == torch.int8 and case.query.dtype.itemsize == 2
    of_weights = 2.0**-12 if by_bytes else 2.0**-15
    allowed = exact.abs() * torch.finfo(case.query.dtype).eps / 2 + sizes * of_weights + 1e-7
    assert ((out - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 64, "block_size": 15},
        {"head_dim": 96, "block_size": 16, "num_heads": 8},
        {"head_dim": 34, "block_size": 64, "num_heads": 2},
        {"head_dim": 36, "block_size": 64, "num_heads": 2},
        {"head_dim": 128, "block_size": 1, "window": 40},
        {"head_dim": 160, "block_size": 31, "num_heads": 12, "chunk": 50},
    ],
    ids=str,
)
@pytest.mark.parametrize("lens", [([1, 17, 150], [1, 1, 8]), ([33, 97], [33, 70])], ids=str)
@every_cache
def test_results_are_rounded_once(
    make_paged_case: MakeCase,
    cache: dict[str, Any],
    lens: tuple[list[int], list[int]],
    shape: dict[str, int],
    dtype: torch.dtype,
) -> None:
    """Of a few rows of a sequence and of many."""
    rounded_once(make_paged_case(*lens, **shape, **cache, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80])
@every_cache
def test_several_long_contexts_keep_their_splits_apart(
    make_paged_case: MakeCase, cache: dict[str, Any], head_dim: int, dtype: torch.dtype
) -> None:
    """Of few rows each, so that threads share the splits of every one."""
    lens = [600, 300, 700, 513, 260], [1, 1, 2, 4, 1]
    case = make_paged_case(*lens, num_heads=8, head_dim=head_dim, block_size=16, dtype=dtype, **cache)
    rounded_once(case)
    together = case.out.clone()
    for sequence in range(len(lens[0])):
        first, last = case.query_start_loc[sequence : sequence + 2].tolist()
        assert torch.equal(kernel(case.alone(sequence)), together[first:last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [20, 64])
@pytest.mark.parametrize("query_len", [1, 8])
@every_cache
def test_nothing_is_read_or_written_beyond_its_end(
    make_paged_case: MakeCase, cache: dict[str, Any], query_len: int, head_dim: int, dtype: torch.dtype
) -> None:
    case = make_paged_case([8, 300], [1, query_len], num_heads=4, head_dim=head_dim, dtype=dtype, **cache)
    expected = kernel(case)
    last = int(case.block_tables[case.block_tables < case.key_cache.shape[0]].max())
    case = case._replace(key_cache=case.key_cache[: last + 1], value_cache=case.value_cache[: last + 1])
    ended = case._make(at_the_end(x) if isinstance(x, torch.Tensor) else x for x in case)
    assert torch.equal(kernel(ended), expected)


def test_a_soft_cap_has_no_bias_where_its_series_ends(make_paged_case: MakeCase) -> None:
    """Of two keys of score 0 and a little below 0.3 caps: errors of one sign would not average out."""
    case = make_paged_case([2] * 500, [1] * 500, num_heads=2, num_kv_heads=2, soft_cap=4.0)
    case.query[:] = 0
    case.query[..., 0] = torch.linspace(1.05, 1.19, 1000).view(500, 2)
    first = case.block_tables[:, 0].long()
    case.key_cache[first, :2] = 0
    case.key_cache[first, 0, :, 0] = 4.0  # times a scale of a quarter
    case.value_cache[first, 0], case.value_cache[first, 1] = 1.0, -1.0
    errors = kernel(case).double() - formula(case, torch.float64)
    assert errors.abs().max() < 1e-6
    assert errors.mean().abs() < 5e-8


def test_a_table_may_be_full_name_block_0_and_be_of_a_sequence_without_queries(
    make_paged_case: MakeCase,
) -> None:
    case = make_paged_case([8, 8, 5], [1, 0, 3])
    expected = kernel(case)
    for cache in (case.key_cache, case.value_cache):
        cache[0] = cache[case.block_tables[0, 0].long()]
    case.block_tables[0, 0] = 0
    case = case._replace(block_tables=case.block_tables[:, :2], out=torch.full_like(case.out, torch.nan))
    assert torch.equal(kernel(case), expected)


def test_every_block_that_a_window_shows_is_looked_at_first(make_paged_case: MakeCase) -> None:
    """Of a sequence that comes first, too: its first query is at 18 and sees 13, in the fourth block."""
    case = make_paged_case([30, 9], [12, 1], window=6)
    case.block_tables[0, 3] = 1000
    with pytest.raises(ShapeError, match="sequence 0 has seq_len"):
        kernel(case)
    assert case.out.isnan().all()


@given(batches())
def test_formula_is_what_torch_calls_attention(make_paged_case: MakeCase, batch: Any) -> None:
    case = make_paged_case(**batch | {"soft_cap": 0.0, "cache_dtype": None}, dtype=torch.float64)
    case = case._replace(key_scale=1.0, value_scale=1.0)
    ours = formula(case, torch.float64)
    for sequence, length in enumerate(case.seq_lens.tolist()):
        first, last = case.query_start_loc[sequence : sequence + 2].tolist()
        keys, values = gathered(case, sequence)
        position = torch.arange(length - (last - first), length)[:, None]
        visible = torch.arange(length) <= position
        if case.window > 0:
            visible &= torch.arange(length) > position - case.window
        if case.chunk > 0:
            visible &= torch.arange(length) // case.chunk == position // case.chunk
        query = case.query[first:last].transpose(0, 1)
        expected = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=visible, scale=case.scale, enable_gqa=True
        )
        torch.testing.assert_close(ours[first:last], expected.transpose(0, 1))


def gathered(case: Any, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a sequence, [kv_heads, length, head_dim], zero where nothing may be read."""
    length, block_size = int(case.seq_lens[sequence]), case.key_cache.shape[1]
    blocks = case.block_tables[sequence, : -(-length // block_size)].long()
    blocks = torch.where(blocks < case.key_cache.shape[0], blocks, 0)
    rows = (cache[blocks].flatten(0, 1)[:length] for cache in (case.key_cache, case.value_cache))
    keys, values = (x.nan_to_num(0.0).transpose(0, 1) for x in rows)
    return keys, values


@given(batches(max_len=300))
def test_a_row_has_the_same_bits_alone_and_in_a_batch(make_paged_case: MakeCase, batch: Any) -> None:
    case = make_paged_case(**batch)
    together = kernel(case)
    for sequence, length in enumerate(batch["seq_lens"]):
        first, last = case.query_start_loc[sequence : sequence + 2].tolist()
        if length:
            assert torch.equal(kernel(case.alone(sequence)), together[first:last])


@pytest.mark.parametrize("chunk", [1, 5, 64, 256, 299])
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"window": 70},
        {"chunk": 70},
        {"cache_dtype": FP8},
        {"cache_dtype": torch.int8},
        {"dtype": torch.bfloat16, "head_dim": 64},
    ],
    ids=str,
)
def test_a_row_has_the_same_bits_however_its_prompt_is_chunked(
    make_paged_case: MakeCase, chunk: int, limits: dict[str, Any]
) -> None:
    whole = make_paged_case([300], [300], num_heads=6, block_size=16, **limits)
    expected = kernel(whole)
    for start in range(0, 300, chunk):
        end = min(start + chunk, 300)
        part = whole._replace(
            out=torch.empty_like(whole.out[start:end]),
            query=whole.query[start:end],
            seq_lens=torch.tensor([end], dtype=torch.int32),
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
        )
        assert torch.equal(kernel(part), expected[start:end])


@pytest.mark.parametrize("head_dim", [8, 20, 24, 64, 104, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 5])
@pytest.mark.parametrize("limits", [{}, {"window": 35}, {"chunk": 49, "cache_dtype": FP8}], ids=str)
def test_a_row_has_the_same_bits_among_few_rows_and_many(
    make_paged_case: MakeCase, limits: dict[str, Any], group: int, head_dim: int
) -> None:
    """Keys are packed for many; windows and chunks begin at odd keys, and lengths end at them."""
    shape = {"num_heads": 2 * group, "num_kv_heads": 2, "head_dim": head_dim, "block_size": 7}
    whole = make_paged_case([85], [85], **shape, **limits, dtype=torch.bfloat16)
    expected = kernel(whole)
    for start in (0, 1, 34, 48, 49, 64, 83, 84):
        part = whole._replace(
            out=torch.empty_like(whole.out[start : start + 1]),
            query=whole.query[start : start + 1],
            seq_lens=torch.tensor([start + 1], dtype=torch.int32),
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        )
        assert torch.equal(kernel(part), expected[start : start + 1])


@every_cache
def test_bits_do_not_depend_on_the_number_of_threads(
    make_paged_case: MakeCase, cache: dict[str, Any]
) -> None:
    case = make_paged_case([2000, 1, 700], [1, 1, 300], num_heads=8, head_dim=64, block_size=16, **cache)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(kernel(case._replace(out=torch.empty_like(case.out))))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("provider", ["cpu", "reference"])
def test_padding_rows_and_rows_beyond_the_batch_keep_what_they_held(
    make_paged_case: MakeCase, provider: str
) -> None:
    case = make_paged_case([5, 0, 0], [1, 1, 0])
    longer = torch.full((6, *case.out.shape[1:]), 7.0)
    query = torch.cat([case.query, torch.full_like(longer[2:], torch.nan)])
    select("paged_attention", device=CPU, dtype=torch.float32, provider=provider).call(
        *case._replace(out=longer, query=query)
    )
    assert longer[0].isfinite().all()
    assert (longer[1:] == 7.0).all()


def test_nan_of_one_sequence_stays_there(make_paged_case: MakeCase) -> None:
    case = make_paged_case([9, 9], [1, 4])
    case.value_cache[case.block_tables[0, 0].long()] = torch.nan
    out = kernel(case)
    assert out[0].isnan().all()
    assert out[1:].isfinite().all()


@pytest.mark.parametrize("length", [9, 600])
def test_nan_of_an_earlier_call_is_forgotten(make_paged_case: MakeCase, length: int) -> None:
    case = make_paged_case([length], [1])
    expected = kernel(case).clone()
    assert kernel(case._replace(query=case.query * torch.nan)).isnan().all()
    assert torch.equal(kernel(case), expected)


def test_an_empty_batch_is_no_work(make_paged_case: MakeCase) -> None:
    assert kernel(make_paged_case([], [])).shape[0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_opcheck(make_paged_case: MakeCase, dtype: torch.dtype) -> None:
    case = make_paged_case([5, 9, 0], [1, 4, 1], dtype=dtype)
    torch.library.opcheck(torch.ops.lamina.paged_attention.default, tuple(case.to(dtype)))
