"""Attention by fixed splits on a GPU: right amid poison, the same bits however divided, and in graphs."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lamina.custom_ops import linear
from lamina.custom_ops._shared.registry import select
from lamina.custom_ops.paged_attention import _cuda, _fixed_splits

from ..custom_ops.decode_steps import Step, make_step
from .paged_cases import DEVICE, PagedCase, exact, make_case, naive
from .test_paged_attention import batches

pytestmark = pytest.mark.gpu
MASKS = -1, -1, 0.0
OPS = torch.ops.lamina


@pytest.fixture(autouse=True, scope="module")
def _by_fixed_splits() -> Iterator[None]:
    if _cuda.hopper_obstacle(DEVICE, torch.bfloat16, 128, 64) is not None:
        pytest.skip("these kernels are for compute capability 9.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fixed_splits, "ENABLED", True)
        yield


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def attend(case: PagedCase) -> Tensor:
    """What the kernels write over poison."""
    case.out.fill_(torch.nan)
    OPS.paged_attention.default(*case, True)
    return case.out.clone()


@pytest.fixture(scope="session")
def check_right(assert_close_to_reference: Callable[..., None]) -> Callable[[PagedCase], None]:
    """check_right(case): the kernels err at most twice as much as the naive version."""

    def compare(case: PagedCase) -> None:
        out, expected = attend(case), exact(case)
        written = expected.isfinite()
        assert torch.equal(out.isfinite(), written), "rows written or left alone wrongly, or poison was read"
        if written.any():
            assert_close_to_reference(out[written], expected[written], naive(case)[written], floor=4e-6)

    return compare


CASES = {
    "decode": ([1, 63, 64, 65, 511, 512, 513, 769, 1025, 5000], [1] * 10),
    "one long": ([33_000], [1]),
    "one that is half full, of few rows": ([20_000, 17], [9, 17]),
    "prompts": ([1, 127, 128, 700, 1500, 0], [1, 127, 128, 700, 1500, 0]),
    "chunks": ([1024, 4000, 515], [512, 300, 3]),
    "all at once": ([2048, 6000, 300, 1, 900], [2048, 1, 40, 1, 2]),
    "many": ([30 + 41 * seq % 1400 for seq in range(300)], [1] * 300),
}


@pytest.mark.parametrize("limits", [{}, {"window": 100}, {"window": 700}, {"chunk": 600}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(128, 32, 8), (64, 8, 1), (128, 6, 2)])
@pytest.mark.parametrize("name", CASES)
def test_it_is_right_amid_poison(
    check_right: Callable[[PagedCase], None],
    name: str,
    head_dim: int,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    limits: dict[str, int],
) -> None:
    lens, queries = CASES[name]
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "block_size": 64}
    check_right(make_case(lens, queries, dtype=dtype, extra_tokens=2, **sizes, **limits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@settings(max_examples=80, deadline=None, derandomize=False)
@given(batch=batches(), head_dim=st.sampled_from([64, 128]), block_size=st.sampled_from([64, 128, 256]))
def test_any_batch_errs_no_more_than_twice_the_plain_version(
    check_right: Callable[[PagedCase], None],
    dtype: torch.dtype,
    batch: dict[str, Any],
    head_dim: int,
    block_size: int,
) -> None:
    own = {"head_dim": head_dim, "block_size": block_size, "soft_cap": 0.0}
    check_right(make_case(**batch | own, dtype=dtype))


@pytest.mark.parametrize("whole", [128, 512, 1 << 20])
@pytest.mark.parametrize("workspace", [0, 1 << 21, 1 << 22])
def test_who_takes_a_split_does_not_show(whole: int, workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lens = [700, 1, 5000, 12_345, 512]
    queries = [1, 1, 2, 1, 3]
    case = make_case(lens, queries, num_heads=32, num_kv_heads=8, block_size=64)
    expected = attend(case)
    for name in ("WHOLE_KEYS", "WHOLE_KEYS_OF_MANY"):
        monkeypatch.setattr(_fixed_splits, name, whole)
    monkeypatch.setattr(_fixed_splits, "WORKSPACE_FLOATS", workspace)
    _fixed_splits.plan.cache_clear()
    found = attend(case)
    _fixed_splits.plan.cache_clear()
    assert torch.equal(bits(found), bits(expected))


def on_gpu(step: Step) -> Step:
    return Step(*(tensor.to(DEVICE) for tensor in step))


@functools.cache
def rotate() -> Callable[..., Tensor]:
    provider = select("rotary_and_write_kv_cache", device=DEVICE, dtype=torch.bfloat16, provider="cuda")
    return provider.call


def by_two(step: Step, masks: tuple[int, int, float]) -> Tensor:
    """Over NaN: rotation and cache write, then attention."""
    query = rotate()(*step[:8])
    out = torch.full_like(query, torch.nan)
    _fixed_splits.attend(out, query, *step[5:7], *step[8:], 1, step.query.shape[2] ** -0.5, *masks)
    return out


def at_once(step: Step, masks: tuple[int, int, float], out: Tensor) -> None:
    _fixed_splits.rotate_and_attend(out, *step, step.query.shape[2] ** -0.5, *masks)


def check(step: Step, masks: tuple[int, int, float] = MASKS) -> None:
    """Both ways leave the same bits in the outputs and in the cache."""
    one, other = step.copied(), step.copied()
    expected, out = by_two(other, masks), torch.full_like(step.query, torch.nan)
    at_once(one, masks, out)
    assert torch.equal(bits(one.key_cache), bits(other.key_cache))
    assert torch.equal(bits(one.value_cache), bits(other.value_cache))
    assert torch.equal(bits(out), bits(expected))
    live = int(step.query_start_loc[-1])
    assert out[:live].isfinite().all()
    assert out[live:].isnan().all()


@pytest.mark.parametrize("masks", [MASKS, (1, -1, 0.0), (100, -1, 0.0), (-1, 600, 0.0)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
def test_decode_that_rotates_leaves_the_bits_of_two_kernels(
    head_dim: int, group: int, masks: tuple[int, int, float]
) -> None:
    lens = [1, 2, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1029, 5000, 0, 0]
    check(on_gpu(make_step(lens, head_dim=head_dim, group=group, block_size=64)), masks)
    for length in (1, 64, 513, 9000):
        check(on_gpu(make_step([length], head_dim=head_dim, group=group, kv_heads=8, block_size=64)), masks)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("length", [64, 128, 512, 1024])
def test_a_block_that_another_completes_in_this_step_is_seen(order: tuple[int, int], length: int) -> None:
    lens = [0] * 300
    first, second = order
    lens[first], lens[second] = length, length + 1
    lens[2:250] = [40 + seq for seq in range(248)]
    check(on_gpu(make_step(lens, shared={second: first}, head_dim=128, block_size=64)))


@settings(max_examples=40, deadline=None)
@given(
    lens=st.lists(st.integers(1, 2000), min_size=1, max_size=40),
    kv_heads=st.sampled_from([1, 2, 8]),
    block_size=st.sampled_from([64, 256]),
    head_dim=st.sampled_from([64, 128]),
)
def test_any_step(lens: list[int], kv_heads: int, block_size: int, head_dim: int) -> None:
    step = make_step(lens, kv_heads=kv_heads, block_size=block_size, head_dim=head_dim, seed=sum(lens))
    check(on_gpu(step))


@pytest.mark.parametrize("batch", [1, 8, 32, 130])
@pytest.mark.parametrize("rotates", [True, False])
def test_in_a_cuda_graph_between_gemms_it_reads_what_the_one_ahead_wrote(batch: int, rotates: bool) -> None:
    """Several layers on one workspace, replayed with fresh rows: nothing is read too early, or left over."""
    heads, kv_heads, head_dim, hidden = 32, 8, 64, 2048  # of which GEMMs are our own
    lens = [130 + 97 * seq % 1500 for seq in range(batch)]
    sizes = {"head_dim": head_dim, "group": 4, "kv_heads": kv_heads, "block_size": 64}
    steps = [on_gpu(make_step(lens, seed=layer, **sizes)) for layer in range(4)]
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

    def in_one(step: Step, out: Tensor) -> None:
        at_once(step, MASKS, out)

    def in_two(step: Step, out: Tensor) -> None:
        out.copy_(by_two(step, MASKS))

    captured = in_one if rotates else in_two
    forward(captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = forward(captured)
    for seed in range(20):
        x.copy_(torch.randn(batch, hidden, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16))
        graph.replay()
        found = result.clone()
        assert torch.equal(bits(found), bits(forward(in_two))), seed
