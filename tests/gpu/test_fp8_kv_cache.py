"""Keys and values in FP8 on a GPU: attention against the formula on what is stored, writes against torch."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import UnsupportedError
from lamina.custom_ops import paged_attention, rotary_embedding, write_kv_cache
from lamina.custom_ops._shared.fp8 import FP8
from lamina.custom_ops._shared.fp8_cache import to_fp8
from lamina.custom_ops._shared.registry import select
from lamina.custom_ops.paged_attention import _cuda

from .paged_cases import CANARY, DEVICE, PagedCase, make_case
from .test_paged_attention import batches, check, run  # noqa: F401
from .test_paged_attention_triton import check as check_triton  # noqa: F401

pytestmark = pytest.mark.gpu

Check = Callable[[PagedCase], Tensor]
by_either = pytest.mark.parametrize("prefill", ["many", "hopper"], indirect=True)
DTYPES = [torch.bfloat16, torch.float16]
SCALED = {"cache_dtype": FP8, "key_scale": 0.7, "value_scale": 3.0}


@pytest.fixture(autouse=True)
def prefill(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Which kernel takes many rows: that of Hopper only where a test asks for it."""
    monkeypatch.setattr(_cuda, "HOPPER_READS_FP8", getattr(request, "param", "many") == "hopper")
    _cuda.hopper_obstacle.cache_clear()
    yield
    _cuda.hopper_obstacle.cache_clear()


@by_either
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=120, derandomize=False)
@given(batch=batches().filter(lambda batch: batch["head_dim"] % 16 == 0), scales=st.sampled_from([1.0, 0.02]))
def test_any_batch_errs_no_more_than_twice_the_plain_version(
    check: Check,  # noqa: F811
    dtype: torch.dtype,
    batch: dict[str, Any],
    scales: float,
) -> None:
    check(make_case(**batch, dtype=dtype, cache_dtype=FP8, key_scale=3 * scales, value_scale=scales))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 16])
def test_every_kernel_in_decode_and_in_prefill(
    check: Check,  # noqa: F811
    dtype: torch.dtype,
    head_dim: int,
    group: int,
) -> None:
    shape = {"num_heads": 2 * group, "num_kv_heads": 2, "head_dim": head_dim, "dtype": dtype, **SCALED}
    check(make_case([1, 700, 0, 64, 1029], [1, 1, 1, 1, 1], **shape))
    check(make_case([300, 777], [300, 200], **shape))


@by_either
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [64, 256])
def test_prefill_of_ragged_chunks_over_prefixes_beside_decode(
    check: Check,  # noqa: F811
    head_dim: int,
    block_size: int,
) -> None:
    shape = {"head_dim": head_dim, "block_size": block_size, **SCALED}
    check(make_case([1], [1], num_heads=40, num_kv_heads=2, **shape))
    check(make_case([128, 256, 384], [128, 128, 384], num_heads=8, num_kv_heads=2, **shape))
    check(make_case([127, 129, 257, 2], [127, 128, 3, 2], num_heads=8, num_kv_heads=8, **shape))
    lens, query_lens = [1000, 77, 0, 1300, 5, 640, 31], [300, 1, 0, 17, 5, 128, 31]
    for group in (1, 3, 4, 5, 7, 8, 16):
        check(make_case(lens, query_lens, num_heads=2 * group, num_kv_heads=2, extra_tokens=3, **shape))


@by_either
@pytest.mark.parametrize("limit", [("window", n) for n in (1, 100, 400)] + [("chunk", n) for n in (64, 200)])
@pytest.mark.parametrize("block_size", [16, 64])
def test_prefill_and_decode_that_see_a_window_or_their_own_chunk(
    check: Check,  # noqa: F811
    limit: tuple[str, int],
    block_size: int,
) -> None:
    lens, query_lens = [1000, 77, 0, 1300, 5, 640, 3000], [300, 1, 0, 17, 5, 128, 1]
    for head_dim, heads in ((64, 6), (128, 8), (128, 40)):
        shape = {"head_dim": head_dim, "block_size": block_size, **SCALED}
        check(make_case(lens, query_lens, num_heads=heads, num_kv_heads=2, **dict([limit]), **shape))
        check(make_case([9000], [70], num_heads=heads, num_kv_heads=2, **dict([limit]), **shape))


@by_either
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_kernel_once_in_small_shapes(check: Check, head_dim: int) -> None:  # noqa: F811
    """What the sanitizers run, which slow kernels down a hundredfold."""
    shape = {"head_dim": head_dim, "num_kv_heads": 2, "capacity": 4096, "block_size": 64, **SCALED}
    check(make_case([1, 300, 0, 530], [1, 1, 1, 1], num_heads=8, **shape))
    check(make_case([300, 40], [4, 1], num_heads=8, **shape))
    check(make_case([1100, 33, 0], [150, 1, 0], num_heads=8, **shape))
    check(make_case([200, 333], [130, 33], num_heads=6, window=100, **shape))
    check(make_case([700, 333], [70, 33], num_heads=6, soft_cap=20.0, **shape))


@by_either
@pytest.mark.parametrize("query_len", [*range(1, 140, 7), 255, 256, 257, 300])
def test_a_chunk_of_any_length_over_a_prefix(check: Check, query_len: int) -> None:  # noqa: F811
    lens = [query_len + 345, 9], [query_len, 1]
    for head_dim in (64, 128):
        check(make_case(*lens, head_dim=head_dim, block_size=64, seed=query_len, cache_dtype=FP8))


@by_either
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_whose_scores_dwarf_those_of_other_keys(
    check: Check,  # noqa: F811
    dtype: torch.dtype,
    head_dim: int,
) -> None:
    for lens, query_lens in (([1500], [900]), ([700, 5000, 333], [700, 40, 1])):
        case = make_case(lens, query_lens, head_dim=head_dim, block_size=64, dtype=dtype)
        case.key_cache.mul_(torch.linspace(0.1, 8, len(case.key_cache), device=DEVICE).view(-1, 1, 1, 1))
        narrow = (padded(cache) for cache in (case.key_cache, case.value_cache))
        check(case._replace(**dict(zip(("key_cache", "value_cache"), narrow, strict=True))))


def padded(cache: Tensor) -> Tensor:
    """The cache in FP8, in rows of a multiple of 16 bytes."""
    return cache.contiguous().to(FP8)


@by_either
@pytest.mark.parametrize("size", [2.0**-100, 2.0**-30, 1e5, 1e30])
@pytest.mark.parametrize("query_lens", [[1, 1], [4, 1], [200, 40]])
def test_queries_far_beyond_the_range_of_float16_lose_nothing(
    check: Check,  # noqa: F811
    size: float,
    query_lens: list[int],
) -> None:
    """In every third row, so that others of the tile are of another size."""
    case = make_case([700, 333], query_lens, block_size=64, cache_dtype=FP8)
    case.query[::3].mul_(size)
    scale = case.scale / max(size, 1.0)
    check(case._replace(scale=scale))


@by_either
@pytest.mark.parametrize("lens", [(40000,), (127, 128, 129, 16384), (5000,) * 3])
def test_long_contexts_are_joined_from_their_splits(
    check: Check,  # noqa: F811
    lens: tuple[int, ...],
) -> None:
    ones = [1] * len(lens)
    check(make_case(lens, ones, num_heads=32, num_kv_heads=8, **SCALED))
    check(make_case(lens, ones, num_heads=9, num_kv_heads=3, head_dim=64, window=3000, **SCALED))
    check(make_case([20000], [37], num_heads=32, num_kv_heads=8, block_size=64, **SCALED))


@by_either
@pytest.mark.parametrize("lens,query_lens", [([900, 5000, 77], [1, 1, 1]), ([900, 700, 5000], [3, 500, 1])])
def test_a_row_has_the_same_bits_whatever_its_neighbours_and_each_time(
    lens: list[int], query_lens: list[int]
) -> None:
    case = make_case(lens, query_lens, capacity=6000, block_size=64, **SCALED)
    expected, changed = run(case), case._replace(seq_lens=case.seq_lens.clone(), out=case.out.clone())
    assert all(torch.equal(run(case), expected) for _ in range(20))
    changed.seq_lens[1:] = torch.tensor([0, 60], device=DEVICE)
    rows = slice(0, query_lens[0])
    assert torch.equal(run(changed)[rows], expected[rows])


@by_either
@pytest.mark.parametrize("query_len", [1, 4, 300])
def test_padding_rows_and_rows_beyond_the_batch_keep_what_they_held(query_len: int) -> None:
    case = make_case([400, 0, 0], [query_len, 1, 0], extra_tokens=3, block_size=64, **SCALED)
    paged_attention(*case)
    assert case.out[:query_len].isfinite().all()
    assert (case.out[query_len:] == CANARY).all()


@pytest.mark.parametrize("head_dim,num_heads", [(128, 32), (64, 24), (256, 8)])
def test_a_captured_call_honours_grown_lengths_and_a_smaller_batch(
    check: Check,  # noqa: F811
    head_dim: int,
    num_heads: int,
) -> None:
    shape = {"num_heads": num_heads, "num_kv_heads": 8, "head_dim": head_dim, "capacity": 20100, **SCALED}
    static = make_case([20000, 3, 500, 4000], [1, 1, 1, 1], **shape)
    run(static)  # makes the workspace
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(*static)
    for lens in ([20000, 3, 500, 4000], [1, 2, 499, 0], [17, 0, 0, 4000], [19999, 3, 2, 1]):
        static.seq_lens.copy_(torch.tensor(lens))
        static.out.fill_(torch.nan)
        graph.replay()
        expected = check(static._replace(out=static.out.clone()))
        assert torch.equal(static.out.isnan(), expected.isnan())
        assert torch.equal(static.out.nan_to_num(), expected.nan_to_num())


def test_what_no_kernel_takes_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="wanted a multiple of 16"):
        run(make_case([5], [1], head_dim=72, cache_dtype=FP8))
    with pytest.raises(UnsupportedError, match="float32 is not taken beside a cache in FP8"):
        run(make_case([5], [1], dtype=torch.float32, cache_dtype=FP8))


SHAPES: dict[str, dict[str, Any]] = {
    "8B": {"num_heads": 32, "num_kv_heads": 8},
    "groups of 3": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "block_size": 32},
    "groups of 16": {"num_heads": 16, "num_kv_heads": 1, "head_dim": 80},
    "window": {"num_heads": 8, "num_kv_heads": 2, "window": 100},
    "soft cap": {"num_heads": 8, "num_kv_heads": 2, "soft_cap": 30.0},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_triton_in_decode_prefill_and_mixed_batches(
    check_triton: Check,  # noqa: F811
    dtype: torch.dtype,
    shape: dict[str, Any],
) -> None:
    check_triton(make_case([1, 700, 0, 64, 1029], [1, 1, 1, 1, 1], **shape, **SCALED, dtype=dtype))
    check_triton(make_case([300, 40, 0, 777], [300, 1, 0, 200], **shape, **SCALED, dtype=dtype))
    check_triton(make_case([5000], [1], **shape, **SCALED, dtype=dtype))  # split


def numbers(dtype: torch.dtype) -> Tensor:
    """Every number of two bytes; of four those of FP8, their middles, what is next to these, odd ones."""
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16, device=DEVICE).view(dtype)
    known = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    middles = (known[1:] + known[:-1]) / 2
    near = torch.cat([middles, middles.nextafter(torch.zeros(())), middles.nextafter(torch.full((), 1e9))])
    special = torch.tensor([0.0, 448.0, 464.0, 480.0, 1e30, torch.inf, torch.nan, 1e-30, 1e-45])
    many = torch.cat([known, near, special, torch.randn(4096) * 2.0 ** torch.randint(-14, 12, (4096,))])
    return torch.cat([many, -many]).to(DEVICE)


def same(stored: Tensor, expected: Tensor) -> bool:
    """Whether numbers in FP8 are equal, any NaN to any other."""
    ours, theirs = stored.float(), expected.float()
    return torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.parametrize("provider", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("dim", [128, 20])
def test_every_number_is_written_divided_and_rounded_to_the_nearest(
    provider: str, dtype: torch.dtype, scale: float, dim: int
) -> None:
    values = numbers(dtype)
    key = values[: len(values) // (2 * dim) * 2 * dim].view(-1, 2, dim)
    value, num_blocks = key.flip(0), -(-len(key) // 16) + 1
    caches = [torch.full((num_blocks, 16, 2, dim), CANARY, device=DEVICE).to(FP8) for _ in range(2)]
    slots = torch.randperm(16 * num_blocks, device=DEVICE)[: len(key)].int()
    call = select("write_kv_cache", device=DEVICE, dtype=dtype, provider=provider).call
    call(key, value, *caches, slots, scale, 2 * scale)
    for cache, rows, own in zip(caches, (key, value), (scale, 2 * scale), strict=True):
        flat = cache.view(torch.uint8).flatten(0, 1)
        assert same(flat[slots.long()].view(FP8), to_fp8(rows, own))
        untouched = torch.ones(len(flat), dtype=torch.bool, device=DEVICE)
        untouched[slots.long()] = False
        assert (flat[untouched].view(FP8).float() == CANARY).all()


@pytest.mark.parametrize("provider", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (3, 1, 20)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 37])
def test_rotary_with_the_write_is_rotary_and_then_the_write(
    provider: str, dtype: torch.dtype, heads: tuple[int, int, int], num_tokens: int
) -> None:
    num_heads, num_kv_heads, dim = heads
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, dim, device=DEVICE).to(dtype) * 3
    query, key, value = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    angles = torch.rand(num_tokens, dim // 2, device=DEVICE) * 100
    slots = torch.randperm(96, device=DEVICE)[:num_tokens].int()
    slots[1::3] = -1
    fused, plain = (
        [torch.full((6, 16, num_kv_heads, dim), CANARY, device=DEVICE).to(FP8) for _ in range(2)]
        for _ in range(2)
    )
    call = select("rotary_and_write_kv_cache", device=DEVICE, dtype=dtype, provider=provider).call
    out = call(query, key, value, angles.cos(), angles.sin(), *fused, slots, 0.37, 1.7)
    rotated, rotated_key = rotary_embedding(query, key, angles.cos(), angles.sin())
    write_kv_cache(rotated_key, value, *plain, slots, 0.37, 1.7)
    assert torch.equal(out, rotated)
    assert all(itertools.starmap(same, zip(fused, plain, strict=True)))
