"""Decode attention that rotates and writes the cache itself: the bits of two kernels, also in graphs."""

import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lamina.custom_ops import linear
from lamina.custom_ops._shared.fp8 import FP8
from lamina.custom_ops._shared.registry import select
from lamina.custom_ops.paged_attention import _rotating

from ..custom_ops.decode_steps import Step, make_step

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
MASKS = -1, -1, 0.0


@pytest.fixture(scope="module", params=[False, True], ids=["bf16 cache", "fp8 cache"])
def is_fp8(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def on_gpu(step: Step, *, dtype: torch.dtype = torch.bfloat16, is_fp8: bool = False) -> Step:
    """A step on the GPU; poison of the cache is a number that e4m3 has as well."""
    caches = [cache.to(dtype) for cache in (step.key_cache, step.value_cache)]
    if is_fp8:
        caches = [cache.float().clamp(-440, 440).to(FP8) for cache in caches]
    rows = [tensor.to(dtype) for tensor in step[:3]]
    moved = Step(*rows, *step[3:5], *caches, *step[7:])
    return Step(*(tensor.to(DEVICE) for tensor in moved))


def by_two(step: Step, masks: tuple[int, int, float], scales: tuple[float, float]) -> Tensor:
    """Over NaN: rotation and cache write, then attention."""
    chosen = [
        select(op, device=DEVICE, dtype=step.query.dtype, provider="cuda").call
        for op in ("rotary_and_write_kv_cache", "paged_attention")
    ]
    rotate, attend = chosen
    query = rotate(*step[:8], *scales)
    out = torch.full_like(query, torch.nan)
    attend(out, query, *step[5:7], *step[8:], 1, step.query.shape[2] ** -0.5, *masks, *scales)
    return out


@functools.cache
def rotating(is_fp8: bool) -> Callable[..., None]:
    return _rotating.load(is_fp8=is_fp8)


def at_once(step: Step, masks: tuple[int, int, float], scales: tuple[float, float], out: Tensor) -> None:
    """The same in one launch."""
    rotating(step.key_cache.dtype == FP8)(out, *step, step.query.shape[2] ** -0.5, *masks, *scales)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def check(step: Step, masks: tuple[int, int, float] = MASKS) -> None:
    """Both ways leave the same bits in the outputs and in the cache."""
    scales = (0.7, 3.0) if step.key_cache.dtype == FP8 else (1.0, 1.0)
    one, other = step.copied(), step.copied()
    expected, out = by_two(other, masks, scales), torch.full_like(step.query, torch.nan)
    at_once(one, masks, scales, out)
    assert torch.equal(bits(one.key_cache), bits(other.key_cache))
    assert torch.equal(bits(one.value_cache), bits(other.value_cache))
    live = int(step.query_start_loc[-1])
    assert torch.equal(bits(out.contiguous()), bits(expected.contiguous()))
    assert out[:live].isfinite().all()
    assert out[live:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
def test_both_ways_leave_the_same_bits(head_dim: int, group: int, dtype: torch.dtype, is_fp8: bool) -> None:
    lens = [1, 2, 15, 16, 17, 64, 65, 127, 128, 129, 700, 1029, 5000, 0, 0]
    step = make_step(lens, head_dim=head_dim, group=group)
    check(on_gpu(step, dtype=dtype, is_fp8=is_fp8))
    for length in (1, 64, 65, 3000):
        one = make_step([length], head_dim=head_dim, group=group, kv_heads=8, block_size=64)
        check(on_gpu(one, dtype=dtype, is_fp8=is_fp8))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("length", [16, 640])
def test_a_block_that_another_completes_in_this_step_is_seen(
    order: tuple[int, int], length: int, is_fp8: bool
) -> None:
    lens = [0] * 300
    first, second = order
    lens[first], lens[second] = length, length + 1
    lens[2:250] = [40 + seq for seq in range(248)]
    check(on_gpu(make_step(lens, shared={second: first}, head_dim=128), is_fp8=is_fp8))


@pytest.mark.parametrize("masks", [(1, -1, 0.0), (100, -1, 0.0), (-1, 64, 0.0), (-1, -1, 30.0)])
def test_windows_chunks_and_soft_caps(masks: tuple[int, int, float], is_fp8: bool) -> None:
    check(on_gpu(make_step([1, 16, 17, 33, 100, 900], head_dim=128), is_fp8=is_fp8), masks)


@pytest.mark.parametrize("num_short", [20, 100, 250])
def test_long_sequences_among_short_ones(num_short: int) -> None:
    """Their splits beyond what fills the GPU are shared by a few blocks."""
    lens = [20 + seq % 90 for seq in range(num_short)]
    lens[3], lens[-2] = 21_000, 9_000
    check(on_gpu(make_step(lens, head_dim=128, kv_heads=8, block_size=64, width=1024)))


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.integers(1, 2000), min_size=1, max_size=40),
    kv_heads=st.sampled_from([1, 2, 8]),
    block_size=st.sampled_from([16, 32, 64, 256]),
    head_dim=st.sampled_from([64, 128]),
)
def test_any_step(lens: list[int], kv_heads: int, block_size: int, head_dim: int) -> None:
    step = make_step(lens, kv_heads=kv_heads, block_size=block_size, head_dim=head_dim, seed=sum(lens))
    check(on_gpu(step))


@pytest.mark.parametrize("batch", [1, 8, 130])
def test_in_a_cuda_graph_between_gemms_it_reads_what_the_one_ahead_wrote(batch: int, is_fp8: bool) -> None:
    """Several layers on one workspace, replayed with fresh rows: nothing is read too early, or left over."""
    heads, kv_heads, head_dim, hidden = 32, 8, 64, 2048  # of which GEMMs are our own
    lens = [130 + 7 * seq for seq in range(batch)]
    steps = [
        on_gpu(
            make_step(lens, head_dim=head_dim, group=4, kv_heads=kv_heads, block_size=64, seed=layer),
            is_fp8=is_fp8,
        )
        for layer in range(4)
    ]
    scales = (0.7, 3.0) if is_fp8 else (1.0, 1.0)
    width = (heads + 2 * kv_heads) * head_dim
    qkv_weight = torch.randn(width, hidden, device=DEVICE, dtype=torch.bfloat16) / hidden**0.5
    out_weight = torch.randn(hidden, hidden, device=DEVICE, dtype=torch.bfloat16) / hidden**0.5
    x = torch.zeros(batch, hidden, device=DEVICE, dtype=torch.bfloat16)

    def forward(attend: Callable[[Step, Tensor], None]) -> Tensor:
        rows = x
        for step in steps:
            qkv = linear(rows, qkv_weight).view(batch, -1, head_dim)
            split = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
            out = torch.empty(batch, heads, head_dim, device=DEVICE, dtype=torch.bfloat16)
            attend(Step(*split, *step[3:]), out)
            rows = linear(out.view(batch, hidden), out_weight)
        return rows

    def in_two(step: Step, out: Tensor) -> None:
        out.copy_(by_two(step, MASKS, scales))

    forward(lambda step, out: at_once(step, MASKS, scales, out))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = forward(lambda step, out: at_once(step, MASKS, scales, out))
    for seed in range(20):
        x.copy_(torch.randn(batch, hidden, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16))
        graph.replay()
        found = result.clone()
        assert torch.equal(bits(found), bits(forward(in_two))), seed
