"""lamina::write_kv_cache: only the named slots change."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamina.common.errors import ShapeError
from lamina.custom_ops import write_kv_cache
from lamina.custom_ops._shared.fp8 import FP8
from lamina.custom_ops._shared.fp8_cache import to_fp8
from lamina.custom_ops._shared.registry import select
from lamina.custom_ops.write_kv_cache import reference
from lamina.custom_ops.write_kv_cache.int8_rows import INT8, SCALE_BYTES, from_int8

BOTH = pytest.mark.parametrize("provider", ["cpu", "reference"])


def caches(num_blocks: int = 3, block_size: int = 4, heads: int = 2, dim: int = 8) -> list[torch.Tensor]:
    return [torch.full((num_blocks, block_size, heads, dim), 7.0) for _ in range(2)]


def rows(count: int, heads: int = 2, dim: int = 8) -> torch.Tensor:
    return torch.randn(count, heads, dim)


def slots(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@BOTH
def test_padding_slots_change_nothing(provider: str) -> None:
    key_cache, value_cache = caches()
    key, value = rows(3), rows(3)
    write = select("write_kv_cache", device=torch.device("cpu"), dtype=key.dtype, provider=provider).call
    write(key, value, key_cache, value_cache, slots(3, -1, -1))
    for row, cache in ((key[0], key_cache), (value[0], value_cache)):
        assert torch.equal(cache.flatten(0, 1)[3], row)
        assert (cache.flatten(0, 1)[[0, 1, 2, *range(4, 12)]] == 7.0).all()


def test_the_meta_implementation_changes_nothing() -> None:
    meta = [x.to("meta") for x in (rows(3), rows(3), *caches(), slots(3, -1, -1))]
    assert write_kv_cache(*meta) is None


@given(
    st.lists(
        st.integers(-1, 11), min_size=0, max_size=9, unique_by=lambda slot: slot if slot >= 0 else object()
    ),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8]),
    st.booleans(),
)
def test_kernel_writes_what_the_formula_writes(mapping: list[int], dtype: torch.dtype, views: bool) -> None:
    key, value = ((rows(len(mapping), 4, 8) * 50).to(dtype) for _ in range(2))
    written = [caches(heads=4) for _ in range(2)]
    written = [[cache.to(dtype) for cache in pair] for pair in written]
    if views:  # every second head of rows and of caches, values in rows of their own
        key, value = key[:, ::2], torch.cat([value, value], dim=1)[:, 1:3]
        written = [[cache[:, :, ::2] for cache in pair] for pair in written]
    else:
        key, value = key[:, :2].contiguous(), value[:, :2].contiguous()
        written = [[cache[:, :, :2] for cache in pair] for pair in written]
    write_kv_cache(key, value, *written[0], slots(*mapping))
    reference.write_kv_cache(key, value, *written[1], slots(*mapping))
    for ours, expected in zip(*written, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("every", [1, 2])
def test_heads_that_lie_apart_are_written_side_by_side(every: int) -> None:
    key, value = rows(3, heads=4)[:, ::every][:, :2], rows(3, heads=4)[:, ::every][:, :2]
    key_cache, value_cache = caches()
    write_kv_cache(key, value, key_cache, value_cache, slots(3, 0, 11))
    for ours, cache in ((key, key_cache), (value, value_cache)):
        assert torch.equal(cache.flatten(0, 1)[[3, 0, 11]], ours)
        assert (cache.flatten(0, 1)[[1, 2, 4]] == 7.0).all()


def test_a_slot_beyond_the_cache_is_refused_and_nothing_is_written() -> None:
    key_cache, value_cache = caches()
    with pytest.raises(ShapeError, match=r"slot_mapping\[1\] is 12; wanted less than 12"):
        write_kv_cache(rows(2), rows(2), key_cache, value_cache, slots(0, 12))
    assert (key_cache == 7.0).all()


@pytest.mark.parametrize(
    "arguments,message",
    [
        ((rows(2), rows(3), *caches(), slots(0, 1)), "key is"),
        ((rows(2), rows(2), *caches(dim=16), slots(0, 1)), "caches"),
        ((rows(2), rows(2), *caches(), slots(0)), r"wanted \[2\] int32"),
        ((rows(2), rows(2), *caches(), slots(0, 1).long()), r"wanted \[2\] int32"),
        ((rows(2).half(), rows(2), *caches(), slots(0, 1)), "one dtype"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments: tuple[torch.Tensor, ...], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        write_kv_cache(*arguments)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every number of two bytes; of four those between any two of FP8, their middles and what is special."""
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15).short().view(dtype)
    known = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    middles = (known[1:] + known[:-1]) / 2
    near = torch.cat([middles, middles.nextafter(torch.zeros(())), middles.nextafter(torch.full((), 1e9))])
    special = torch.tensor([0.0, 448.0, 464.0, 480.0, 1e30, torch.inf, torch.nan, 1e-30, 1e-45])
    numbers = torch.cat([known, near, special, torch.randn(997) * 2.0 ** torch.randint(-14, 12, (997,))])
    return torch.cat([numbers, -numbers])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**-6])
@pytest.mark.parametrize("dim", [8, 20])
def test_a_cache_in_fp8_takes_every_number_divided_and_rounded_to_the_nearest(
    dtype: torch.dtype, scale: float, dim: int
) -> None:
    values = numbers(dtype)
    key = values[: len(values) // (2 * dim) * 2 * dim].view(-1, 2, dim)
    num_blocks = -(-len(key) // 4)
    key_cache, value_cache = (cache.to(FP8) for cache in caches(num_blocks=num_blocks, dim=dim))
    mapping = torch.randperm(4 * num_blocks)[: len(key)].int()
    write_kv_cache(key, key.flip(0), key_cache, value_cache, mapping, scale, 2 * scale)
    for cache, rows_of, own in ((key_cache, key, scale), (value_cache, key.flip(0), 2 * scale)):
        stored = cache.flatten(0, 1)[mapping.long()].float()
        assert torch.equal(stored.isnan(), rows_of.isnan())
        exact = rows_of.double() / own
        clamped = (rows_of.float() / own).clamp(-448, 448).to(FP8).float()
        assert torch.equal(stored.nan_to_num(), clamped.nan_to_num())
        within = exact.abs() <= 448
        steps = (exact.abs() / 16).clamp(2.0**-10)  # half of one, at most
        assert ((stored - exact).abs() <= steps)[within].all()


def test_a_cache_in_fp8_says_scales_and_dtypes_that_do_not_fit() -> None:
    narrow = [cache.to(FP8) for cache in caches()]
    with pytest.raises(ShapeError, match="wanted finite numbers above 0"):
        write_kv_cache(rows(2), rows(2), *narrow, slots(0, 1), 0.0, 1.0)
    with pytest.raises(ShapeError, match="wanted scales of 1, or a cache in"):
        write_kv_cache(rows(2), rows(2), *caches(), slots(0, 1), 1.0, 0.5)
    with pytest.raises(ShapeError, match="wanted one dtype, or caches in"):
        write_kv_cache(rows(2), rows(2), narrow[0], caches()[0], slots(0, 1))
    with pytest.raises(ShapeError, match="wanted one dtype, or caches in"):
        write_kv_cache(rows(2).char(), rows(2).char(), *narrow, slots(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_cache_in_fp8_is_written_where_the_formula_writes(dtype: torch.dtype) -> None:
    key, value = (rows(4, heads=4).to(dtype)[:, ::2] for _ in range(2))
    key_cache, value_cache = (cache.to(FP8)[:, :, ::2] for cache in caches(heads=4))
    write_kv_cache(key, value, key_cache, value_cache, slots(3, -1, 11, 0), 0.5, 0.25)
    for cache, rows_of, scale in ((key_cache, key, 0.5), (value_cache, value, 0.25)):
        flat = cache.flatten(0, 1).float()
        assert torch.equal(flat[[3, 11, 0]], to_fp8(rows_of[[0, 2, 3]], scale).float())
        assert (flat[[1, 2, 4, 10]] == 7.0).all()


def test_opcheck() -> None:
    arguments = (rows(3), rows(3), *caches(), slots(3, -1, 0))
    torch.library.opcheck(torch.ops.lamina.write_kv_cache.default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dim", [8, 20, 64])
def test_a_cache_in_int8_takes_each_head_by_its_own_largest(dtype: torch.dtype, dim: int) -> None:
    key, value = ((rows(4, dim=dim) * 10.0 ** torch.arange(-3, 5).view(4, 2, 1)).to(dtype) for _ in range(2))
    key[0, 0] = 0.0
    key[1, 1, 3] = torch.nan
    pairs = [[torch.full((3, 4, 2, dim + SCALE_BYTES), 7, dtype=INT8) for _ in range(2)] for _ in range(2)]
    for pair, write in zip(pairs, (write_kv_cache, reference.write_kv_cache), strict=True):
        write(key, value, *pair, slots(3, -1, 0, 11))
    for ours, expected, written in zip(*pairs, (key, value), strict=True):
        assert torch.equal(ours, expected)
        stored = from_int8(ours.flatten(0, 1)[[3, 0, 11]], torch.float64)
        exact = written[[0, 2, 3]].double()
        steps = exact.abs().amax(-1, keepdim=True) / 127
        assert ((stored - exact).abs() <= steps * 0.50001).all()
        assert (ours.flatten(0, 1)[[1, 2, *range(4, 11)]] == 7).all()


def test_a_number_that_is_not_finite_makes_its_head_nan_in_int8() -> None:
    key = rows(2)
    key[0, 1, 3], key[1, 0, 0] = torch.nan, torch.inf
    caches_ = [torch.zeros(1, 4, 2, 8 + SCALE_BYTES, dtype=INT8) for _ in range(2)]
    write_kv_cache(key, key, *caches_, slots(0, 1))
    stored = from_int8(caches_[0][0, :2], torch.float32)
    assert stored[0, 1].isnan().all()
    assert stored[1, 0].isnan().all()
    assert stored[[0, 1], [0, 1]].isfinite().all()


def test_a_cache_in_int8_without_room_for_scales_is_refused() -> None:
    narrow = [torch.zeros(3, 4, 2, 8, dtype=INT8) for _ in range(2)]
    with pytest.raises(ShapeError, match=r"D \+ 4 in int8"):
        write_kv_cache(rows(3), rows(3), *narrow, slots(0, 1, 2))
