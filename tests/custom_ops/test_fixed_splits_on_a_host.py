"""Hopper's attention kernels as C++: rows have the bits they have alone, in chunks and in decode."""

import contextlib
import ctypes
import functools
import itertools
import struct
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lamina.custom_ops.paged_attention import _arguments, _fixed_splits, reference
from lamina.custom_ops.paged_attention._plan import KernelShape
from lamina.custom_ops.rotary_and_write_kv_cache import reference as rotary

from . import host_kernels
from .decode_steps import Step, make_step

pytestmark = pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")
NO_MASKS = -1, -1  # window, chunk
GUARDED = 1 << 15  # floats behind a workspace that nobody may write
Part = tuple[int, int, int]  # a sequence, its first query and that behind the last
Region = tuple[int, int]  # an address, bytes


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = ctypes.CDLL(str(host_kernels.build("hopper_attention", tmp_path_factory.mktemp("hopper"))))
    found.run.restype = ctypes.c_char_p
    found.arguments_size.restype = found.early_copies.restype = ctypes.c_int64
    return found


@contextlib.contextmanager
def gpu_of(
    library: ctypes.CDLL, *, blocks: int = 4, keys: int = 128, whole: int = 128, workspace: int = 1 << 22
) -> Iterator[None]:
    """While it lasts, plans are made for a GPU of so many blocks; splits are of `keys` keys.

    Sequences of more than `whole` keys are divided among blocks, while the workspace has room.
    """

    @functools.cache
    def shape_of(head_dim: int, kernel: int) -> KernelShape:
        rows, floats = ctypes.c_int64(), ctypes.c_int64()
        asked = ctypes.c_int64(kernel), ctypes.c_int64(head_dim), ctypes.byref(rows), ctypes.byref(floats)
        assert library.shape_of(*asked) == 0
        return KernelShape(rows.value, blocks, floats.value)

    workspaces: list[Tensor] = []

    def partials(_: torch.device, size: int) -> Tensor:
        workspaces.append(torch.full((size + GUARDED,), torch.nan))
        workspaces[-1][size:] = 7.0
        return workspaces[-1]

    caches = _fixed_splits.plan, _arguments._counters
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_arguments, "_refuse_capture", lambda: None)
        patch.setattr(_arguments, "_partials", partials)
        patch.setattr(_arguments, "_round_up", lambda count: count)
        patch.setattr(_arguments, "_shapes", lambda *of: functools.partial(shape_of, of[2]))
        patch.setattr(_fixed_splits, "SPLIT_KEYS", keys)
        patch.setattr(_fixed_splits, "WHOLE_KEYS", whole)
        patch.setattr(_fixed_splits, "WHOLE_KEYS_OF_MANY", whole)
        patch.setattr(_fixed_splits, "WORKSPACE_FLOATS", workspace)
        for cached in caches:
            cached.cache_clear()
        yield
    assert all(bool((workspace[-GUARDED:] == 7.0).all()) for workspace in workspaces)
    for cached in caches:
        cached.cache_clear()


def launch(
    library: ctypes.CDLL, launches: Iterator[tuple[float, ...]], ahead: Sequence[Region] = (), seed: int = 0
) -> None:
    """Launch them; the kernel ahead, which writes these regions, ends in the midst of each block."""
    arguments = struct.Struct(f"{_fixed_splits.FIXED_LAYOUT}q")
    assert library.arguments_size() == arguments.size
    flat = [number for region in sorted(set(ahead)) for number in region]
    regions = (ctypes.c_int64 * len(flat))(*flat)
    for fields in launches:
        given = ctypes.c_int64(seed), regions, ctypes.c_int64(len(flat) // 2)
        assert library.run(arguments.pack(*fields, 0), *given) == b""


def all_of(*tensors: Tensor) -> list[Region]:
    """All that lies where these do."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return [(storage.data_ptr(), storage.nbytes()) for storage in storages]


def rows_of(cache: Tensor, slots: Sequence[int]) -> list[Region]:
    row = cache.stride(1) * cache.element_size()
    return [(cache.data_ptr() + slot * row, row) for slot in slots if slot >= 0]


class Sequences:
    """Prompts in blocks that lie apart; what must not be read is NaN."""

    def __init__(self, lens: Sequence[int], head_dim: int, group: int, kv_heads: int = 1, seed: int = 0):
        generator, size = torch.Generator().manual_seed(seed), 64
        used = [-(-length // size) for length in lens]
        order = torch.randperm(sum(used), generator=generator).int() + 1
        self.tables = torch.full((len(lens), max(used) + 1), 2**28, dtype=torch.int32)
        shape = sum(used) + 1, size, kv_heads, head_dim
        self.keys, self.values = (torch.full(shape, torch.nan).bfloat16() for _ in "kv")
        for row, blocks in enumerate(order.split(used)):
            self.tables[row, : used[row]] = blocks
            for cache in (self.keys, self.values):
                rows = torch.randn(lens[row], kv_heads, head_dim, generator=generator).bfloat16()
                places = torch.arange(lens[row])
                cache[blocks.long()[places // size], places % size] = rows
        self.query = [torch.randn(n, group * kv_heads, head_dim, generator=generator) * 2 for n in lens]

    def tensors(self, parts: Sequence[Part]) -> tuple[Tensor, ...]:
        """What the op takes of rows first to before last of some sequences, over NaN."""
        query = torch.cat([self.query[seq][first:last] for seq, first, last in parts]).bfloat16()
        starts = itertools.accumulate((last - first for _, first, last in parts), initial=0)
        lens, first = ([last for *_, last in parts], [*starts])
        return (
            *(torch.full_like(query, torch.nan), query, self.keys, self.values),
            self.tables[[seq for seq, *_ in parts]],
            *(torch.tensor(counts, dtype=torch.int32) for counts in (lens, first)),
        )

    def attend(
        self, library: ctypes.CDLL, parts: Sequence[Part], masks: tuple[int, int] = NO_MASKS, seed: int = 0
    ) -> tuple[Tensor, ...]:
        tensors, counts = self.tensors(parts), [last - first for _, first, last in parts]
        constants = tensors[1].shape[2] ** -0.5, 0.0
        given = tensors, max(counts), masks, constants, _fixed_splits.NO_ROTATION
        slots = [self.slot(seq, key) for seq, first, last in parts for key in range(first, last)]
        ahead = all_of(*tensors[:2]) + rows_of(self.keys, slots) + rows_of(self.values, slots)
        launch(library, _fixed_splits.packed(*given), ahead, seed)
        return tensors[0].split(counts)

    def slot(self, seq: int, key: int) -> int:
        size = self.keys.shape[1]
        return int(self.tables[seq, key // size]) * size + key % size

    def exact(self, parts: Sequence[Part], masks: tuple[int, int] = NO_MASKS) -> Tensor:
        tensors = [
            tensor.double() if tensor.is_floating_point() else tensor for tensor in self.tensors(parts)
        ]
        longest = max(last - first for _, first, last in parts)
        reference.paged_attention(*tensors, longest, tensors[1].shape[2] ** -0.5, *masks, 0.0)
        return tensors[0]


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.int16), right.view(torch.int16))


@pytest.mark.parametrize("masks", [NO_MASKS, (100, -1), (-1, 192)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_prefill_and_decode_and_chunks_give_a_row_the_same_bits(
    library: ctypes.CDLL, head_dim: int, masks: tuple[int, int]
) -> None:
    prompts = Sequences([300, 140], head_dim, 4)
    with gpu_of(library):
        whole = prompts.attend(library, [(0, 0, 300)], masks)[0]
        torch.testing.assert_close(whole.double(), prompts.exact([(0, 0, 300)], masks), atol=0.03, rtol=0.02)
        for parts in (
            [(0, 299, 300)],
            [(0, 284, 300)],
            [(1, 0, 140), (0, 255, 256)],
            [(0, 200, 257), (1, 139, 140)],
        ):
            for (seq, first, last), rows in zip(parts, prompts.attend(library, parts, masks), strict=True):
                assert seq or same_bits(rows, whole[first:last]), (first, last)


@pytest.mark.parametrize("whole", [128, 10_000])
def test_a_row_is_that_of_the_kernel_without_fixed_splits_while_there_is_one(
    library: ctypes.CDLL, whole: int
) -> None:
    prompts = Sequences([250, 90], 128, 4)
    parts = [(0, 0, 250), (1, 80, 90)]
    with gpu_of(library, keys=256, whole=whole):
        expected = prompts.attend(library, parts)
    with gpu_of(library, keys=1024, whole=whole), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fixed_splits, "DECODE_ROWS", 0)
        patch.setattr(_fixed_splits, "PREFILL", 6)
        found = prompts.attend(library, parts)
    assert all(map(same_bits, found, expected))


@pytest.mark.parametrize("length", [300, 385])
def test_decode_loads_keys_of_earlier_steps_before_the_kernel_ahead_has_ended(
    library: ctypes.CDLL, length: int
) -> None:
    prompts, early = Sequences([length], 128, 4), []
    with gpu_of(library):
        expected = prompts.attend(library, [(0, 0, length)])[0][-1:]
        assert library.early_copies() == 0
        for seed in range(6):
            (found,) = prompts.attend(library, [(0, length - 1, length)], seed=seed)
            assert same_bits(found, expected)
            early.append(library.early_copies())
    assert max(early) > 0


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_parts_beside_any_others_have_the_bits_of_whole_prompts(
    library: ctypes.CDLL, data: st.DataObject
) -> None:
    """However many blocks there are, and whichever sequences they divide."""
    draw = data.draw
    head_dim, group = draw(st.sampled_from([64, 128])), draw(st.sampled_from([1, 3, 4, 8]))
    lens = draw(st.lists(st.integers(1, 520), min_size=1, max_size=3))
    prompts = Sequences(lens, head_dim, group, draw(st.sampled_from([1, 2])), draw(st.integers(0, 99)))
    masks = draw(st.sampled_from([NO_MASKS, NO_MASKS, (1, -1), (150, -1), (-1, 160)]))
    parts = []
    for seq in draw(st.permutations(range(len(lens)))):
        last = draw(st.integers(1, lens[seq]))
        first = draw(st.integers(max(0, last - 20), last - 1) | st.integers(0, last - 1))
        parts.append((seq, first, last))
    keys = draw(st.sampled_from([128, 256]))
    of_gpu = {
        "blocks": draw(st.integers(1, 9)),
        "whole": draw(st.sampled_from([128, 300, 4096])),
        "workspace": draw(st.sampled_from([60_000, 80_000, 1 << 22])),
    }
    with gpu_of(library, keys=keys):
        wholes = {seq: prompts.attend(library, [(seq, 0, lens[seq])], masks)[0] for seq, *_ in parts}
    with gpu_of(library, keys=keys, **of_gpu):
        found = prompts.attend(library, parts, masks, draw(st.integers(0, 99)))
    for (seq, first, last), rows in zip(parts, found, strict=True):
        assert same_bits(rows, wholes[seq][first:last]), (seq, first, last)
    exact = prompts.exact(parts, masks)
    torch.testing.assert_close(torch.cat(found).double(), exact, atol=0.03, rtol=0.02)


def check_rotating(
    library: ctypes.CDLL, step: Step, masks: tuple[int, int] = NO_MASKS, **of_gpu: int
) -> None:
    """Rotation, cache write and decode at once leave what two kernels leave, and what the formula says."""
    one, other, live = step.copied(), step.copied(), int(step.query_start_loc[-1])
    scale, slots = step.query.shape[2] ** -0.5, step.slot_mapping.tolist()
    out = torch.full_like(step.query, torch.nan, memory_format=torch.contiguous_format)
    with gpu_of(library, **of_gpu):
        new = [rows_of(cache, slots) for cache in (*one[5:7], *other[5:7])]
        ahead = all_of(out, *one[:5]) + new[0] + new[1]
        launch(library, _fixed_splits.packed_rotating(out, *one, scale, *masks, 0.0), ahead)
        query = rotary.rotary_and_write_kv_cache(*other[:8])
        expected = torch.full_like(query, torch.nan)
        tensors = expected, query, *other[5:7], *other[8:]
        launches = _fixed_splits.packed(tensors, 1, masks, (scale, 0.0), _fixed_splits.NO_ROTATION)
        launch(library, launches, all_of(expected, query) + new[2] + new[3])
    for found, wanted in (
        (out, expected),
        (one.key_cache, other.key_cache),
        (one.value_cache, other.value_cache),
    ):
        assert same_bits(found, wanted)
    assert out[live:].isnan().all()
    exact = torch.full_like(query, torch.nan, dtype=torch.float64)
    caches = [cache.double() for cache in one[5:7]]
    reference.paged_attention(exact, query.double(), *caches, *step[8:], 1, scale, *masks, 0.0)
    torch.testing.assert_close(out[:live].double(), exact[:live], atol=0.03, rtol=0.02)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("masks", [NO_MASKS, (1, -1), (70, -1), (-1, 64)], ids=str)
def test_decode_that_rotates_itself_leaves_the_same_bits(
    library: ctypes.CDLL, head_dim: int, masks: tuple[int, int]
) -> None:
    lens = [1, 64, 65, 128, 129, 300, 0, 0]
    check_rotating(library, make_step(lens, head_dim=head_dim, block_size=64), masks)


@pytest.mark.parametrize("length", [64, 128, 256])
def test_a_block_that_another_completes_in_this_step_is_seen(library: ctypes.CDLL, length: int) -> None:
    """Its last key is in no cache yet; it may lie in the tile, or in the split, before that of the own."""
    for first, second in ((0, 1), (1, 0)):
        lens = [0, 0, 40]
        lens[first], lens[second] = length, length + 1
        step = make_step(lens, block_size=64, head_dim=128, kv_heads=1, shared={second: first})
        check_rotating(library, step)


def test_a_token_without_a_slot_is_written_nowhere_and_its_sequence_sees_the_cache(
    library: ctypes.CDLL,
) -> None:
    step = make_step([140, 17, 33], block_size=64, kv_heads=1)
    for cache in (step.key_cache, step.value_cache):
        cache.view(-1, *cache.shape[2:])[step.slot_mapping[0]] = 0.5
    step.slot_mapping[0] = -1
    check_rotating(library, step)


def test_more_sequences_than_lanes_are_all_found(library: ctypes.CDLL) -> None:
    lens = [1 + seq * 37 % 290 for seq in range(70)] + [0] * 5
    check_rotating(library, make_step(lens, block_size=64, kv_heads=1), blocks=2, workspace=10_500)
