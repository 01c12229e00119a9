"""Decode attention's CUDA kernel as C++: rotation and cache write in its launch, splits of long sequences."""

import contextlib
import ctypes
import functools
import struct
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lamina.custom_ops.paged_attention import _arguments, _plan, _rotating, reference
from lamina.custom_ops.paged_attention._plan import KernelShape
from lamina.custom_ops.rotary_and_write_kv_cache import reference as rotary

from . import host_kernels
from .decode_steps import Step, make_step

pytestmark = pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")
NO_MASKS = -1, -1, 0.0  # window, chunk, soft cap
Kernel = Callable[..., None]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(host_kernels.build("paged_attention", tmp_path_factory.mktemp("attention"))))


@contextlib.contextmanager
def gpu_of(library: ctypes.CDLL, blocks: int) -> Iterator[None]:
    """While it lasts, plans are made for a GPU that holds so many blocks, and sequences are split early."""

    @functools.cache
    def shape_of(kernel: int, head_dim: int) -> KernelShape:
        rows, floats = ctypes.c_int64(), ctypes.c_int64()
        asked = ctypes.c_int64(kernel), ctypes.c_int64(head_dim), ctypes.byref(rows), ctypes.byref(floats)
        assert library.shape_of(*asked) == 0
        return KernelShape(rows.value, blocks, floats.value)

    caches = _plan.plan, _arguments._partials, _arguments._counters
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_arguments, "_refuse_capture", lambda: None)
        patch.setattr(_plan, "MAX_SPLIT_KEYS", 128)
        patch.setattr(_arguments, "_shapes", lambda *of: functools.partial(_swapped, shape_of, of[2]))
        for cached in caches:
            cached.cache_clear()
        yield
    for cached in caches:
        cached.cache_clear()


def _swapped(shape_of: Callable[[int, int], KernelShape], head_dim: int, kernel: int) -> KernelShape:
    return shape_of(kernel, head_dim)


def kernel_of(library: ctypes.CDLL, name: str, layout: str) -> Kernel:
    """A kernel as CudaKernel would call it."""
    arguments = struct.Struct(f"{layout}q")
    size = library.rotating_arguments_size if name == "run_rotating" else library.arguments_size
    size.restype = ctypes.c_int64
    assert size() == arguments.size

    def run(device: torch.device, *fields: float) -> None:
        assert getattr(library, name)(arguments.pack(*fields, 0)) == 0

    return run


def by_two(library: ctypes.CDLL, step: Step, masks: tuple[int, int, float]) -> Tensor:
    """Outputs over NaN: rotation and cache write by the formula, attention by the kernel."""
    query = rotary.rotary_and_write_kv_cache(*step[:8])
    out = torch.full_like(query, torch.nan)
    run = kernel_of(library, "run", _arguments.LAYOUT)
    tensors = out, query, *step.copied()[5:7], *step[8:]
    for tensor, changed in zip(tensors[2:4], step[5:7], strict=True):
        assert torch.equal(tensor.view(torch.int16), changed.view(torch.int16))
    scale = step.query.shape[2] ** -0.5
    for fields in _arguments.packed("cuda", _plan.MANY, *tensors, 1, scale, *masks, 1.0, 1.0):
        run(out.device, *fields)
    return out


def at_once(library: ctypes.CDLL, step: Step, masks: tuple[int, int, float]) -> Tensor:
    """The same by the one kernel."""
    out = torch.full_like(step.query, torch.nan, memory_format=torch.contiguous_format)
    run = kernel_of(library, "run_rotating", _rotating.ROTATING_LAYOUT)
    _rotating.attend(run, _rotating.SOURCE, out, *step, step.query.shape[2] ** -0.5, *masks)
    return out


def check(
    library: ctypes.CDLL, step: Step, masks: tuple[int, int, float] = NO_MASKS, blocks: int = 16
) -> None:
    """Both ways give the same bits, and what the formula says."""
    one, other = step.copied(), step.copied()
    with gpu_of(library, blocks):
        out, expected = at_once(library, one, masks), by_two(library, other, masks)
    for name, found, wanted in (
        ("out", out, expected),
        ("keys", one.key_cache, other.key_cache),
        ("values", one.value_cache, other.value_cache),
    ):
        assert torch.equal(found.view(torch.int16), wanted.view(torch.int16)), name
    live = int(step.query_start_loc[-1])
    assert out[live:].isnan().all()
    query = rotary.rotary_and_write_kv_cache(*step.copied()[:8])
    exact = torch.full_like(query, torch.nan, dtype=torch.float64)
    caches = [cache.double() for cache in one[5:7]]
    scale = step.query.shape[2] ** -0.5
    reference.paged_attention(exact, query.double(), *caches, *step[8:], 1, scale, *masks)
    torch.testing.assert_close(out[:live].double(), exact[:live], atol=0.03, rtol=0.02)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4, 7, 16])
def test_lengths_around_tiles_blocks_and_stages(library: ctypes.CDLL, head_dim: int, group: int) -> None:
    lens = [1, 2, 15, 16, 17, 33, 64, 65, 130, 200, 0, 0]
    check(library, make_step(lens, head_dim=head_dim, group=group), blocks=40)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("length", [16, 64, 160])
def test_a_block_that_another_completes_in_this_step_is_seen(
    library: ctypes.CDLL, order: tuple[int, int], length: int
) -> None:
    """Its last key is in no cache yet, whichever of the two blocks of threads runs first."""
    lens = [0, 0, 40]
    first, second = order
    lens[first], lens[second] = length, length + 1
    check(library, make_step(lens, shared={second: first}, kv_heads=1))


@pytest.mark.parametrize("masks", [(1, -1, 0.0), (20, -1, 0.0), (-1, 32, 0.0), (-1, -1, 5.0)])
def test_windows_chunks_and_soft_caps(library: ctypes.CDLL, masks: tuple[int, int, float]) -> None:
    check(library, make_step([1, 16, 17, 33, 100], kv_heads=1), masks)


@pytest.mark.parametrize("blocks", [2, 8, 24, 100])
def test_long_sequences_among_short_ones_have_their_splits_shared_out(
    library: ctypes.CDLL, blocks: int
) -> None:
    """Of blocks beside those that every sequence has, a few serve all splits there are."""
    check(library, make_step([5, 700, 33, 300, 1, 0], kv_heads=1, width=64), blocks=blocks)


def test_a_token_without_a_slot_is_written_nowhere_and_its_sequence_sees_the_cache(
    library: ctypes.CDLL,
) -> None:
    step = make_step([40, 17, 33], kv_heads=1)
    for cache in (step.key_cache, step.value_cache):
        cache.view(-1, *cache.shape[2:])[step.slot_mapping[1]] = 0.5
    step.slot_mapping[1] = -1
    check(library, step)


def test_tensors_that_lie_otherwise_are_read_as_they_are(library: ctypes.CDLL) -> None:
    """Angles as parts of wider rows, heads of a token apart from each other, queries that are transposed."""
    step = make_step([40, 17, 33], kv_heads=2)
    apart = [torch.stack([tensor, tensor * 0], 2).flatten(1, 2)[:, ::2] for tensor in step[:3]]
    apart[0] = step.query.transpose(1, 2).contiguous().transpose(1, 2)
    angles = [torch.stack([tensor, tensor * 0], 2)[..., 0] for tensor in step[3:5]]
    check(library, Step(*apart, *angles, *step[5:]))


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_step(library: ctypes.CDLL, data: st.DataObject) -> None:
    lens = data.draw(st.lists(st.integers(1, 330), min_size=1, max_size=5))
    shared = {}
    if data.draw(st.booleans()):
        lens.append(data.draw(st.integers(lens[0] // 16 * 16 + 1, lens[0] // 16 * 16 + 16)))
        shared[len(lens) - 1] = 0
    lens += [0] * data.draw(st.integers(0, 2))
    sizes = {"block_size": 16} if shared else {"block_size": data.draw(st.sampled_from([8, 16, 24, 64]))}
    step = make_step(lens, kv_heads=1, shared=shared, seed=data.draw(st.integers(0, 99)), **sizes)
    check(library, step, blocks=data.draw(st.integers(1, 60)))
