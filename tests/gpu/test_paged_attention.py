"""The CUDA kernels of lamina::paged_attention against the formula in float64, amid poison."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import ShapeError, UnsupportedError
from lamina.custom_ops import paged_attention, rms_norm, write_kv_cache
from lamina.custom_ops._shared.registry import select

from .paged_cases import CANARY, DEVICE, PagedCase, exact, make_case, naive

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def run(case: PagedCase) -> Tensor:
    """What the kernels write over poison."""
    case.out.fill_(torch.nan)
    select("paged_attention", device=DEVICE, dtype=case.query.dtype, provider="cuda").call(*case)
    return case.out.clone()


Check = Callable[..., None]


@pytest.fixture(scope="session")
def check(assert_close_to_reference: Check) -> Callable[[PagedCase], Tensor]:
    """check(case) -> the kernels' output, which errs at most twice as much as the naive version."""

    def compare(case: PagedCase) -> Tensor:
        out, expected = run(case), exact(case)
        written = expected.isfinite()
        assert torch.equal(out.isfinite(), written), "rows written or left alone wrongly, or poison was read"
        if written.any():
            assert_close_to_reference(out[written], expected[written], naive(case)[written], floor=4e-6)
        return out

    return compare


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """Mixed batches of decode, a few tokens, chunked and full prefill, and padding, of every shape."""
    kv_heads = draw(st.sampled_from([1, 2, 3, 8]))
    lens = draw(st.lists(st.integers(0, draw(st.sampled_from([40, 300, 1200]))), min_size=1, max_size=6))
    kinds = {
        "decode": lambda n: min(n, 1),
        "few": lambda n: min(n, 5),
        "chunk": lambda n: (n + 1) // 2,
        "full": lambda n: n,
    }
    chosen = st.sampled_from(["decode", "decode", "few", "chunk", "full"])
    return {
        "seq_lens": lens,
        "query_lens": [kinds[draw(chosen)](length) for length in lens],
        "num_heads": kv_heads * draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 12, 16, 20])),
        "num_kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from([16, 32, 64, 72, 80, 96, 128, 200, 256])),
        "block_size": draw(st.sampled_from([4, 8, 16, 24, 32, 64, 128, 256])),
        "window": draw(st.sampled_from([-1, -1, 1, 5, 64, 1000])),
        "chunk": draw(st.sampled_from([-1, -1, 1, 7, 64, 200])),
        "soft_cap": draw(st.sampled_from([0.0, 0.0, 2.0, 30.0])),
        "seed": draw(st.integers(0, 2**31)),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=120, derandomize=False)
@given(batch=batches())
def test_any_batch_errs_no_more_than_twice_the_plain_version(
    check: Callable[[PagedCase], Tensor], dtype: torch.dtype, batch: dict[str, Any]
) -> None:
    check(make_case(**batch, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 16])
def test_every_kernel_in_decode_and_in_prefill(
    check: Callable[[PagedCase], Tensor], dtype: torch.dtype, head_dim: int, group: int
) -> None:
    shape = {"num_heads": 2 * group, "num_kv_heads": 2, "head_dim": head_dim, "dtype": dtype}
    check(make_case([1, 700, 0, 64, 1029], [1, 1, 1, 1, 1], **shape))
    check(make_case([300, 777], [300, 200], **shape))


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 64, 128, 256])
def test_prefill_of_ragged_chunks_over_prefixes_beside_decode(
    check: Callable[[PagedCase], Tensor], dtype: torch.dtype, head_dim: int, block_size: int
) -> None:
    shape = {"head_dim": head_dim, "block_size": block_size, "dtype": dtype}
    check(make_case([1], [1], num_heads=40, num_kv_heads=2, **shape))
    check(make_case([128, 256, 384], [128, 128, 384], num_heads=8, num_kv_heads=2, **shape))
    check(make_case([127, 129, 257, 2], [127, 128, 3, 2], num_heads=8, num_kv_heads=8, **shape))
    lens, query_lens = [1000, 77, 0, 1300, 5, 640, 31], [300, 1, 0, 17, 5, 128, 31]
    for group in (1, 3, 4, 5, 7, 8, 16):
        check(make_case(lens, query_lens, num_heads=2 * group, num_kv_heads=2, extra_tokens=3, **shape))


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("limit", [("window", n) for n in (1, 100, 400)] + [("chunk", n) for n in (64, 200)])
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_prefill_and_decode_that_see_a_window_or_their_own_chunk(
    check: Callable[[PagedCase], Tensor], dtype: torch.dtype, limit: tuple[str, int], block_size: int
) -> None:
    """Blocks and keys that no query sees are poison, whatever tile they lie in."""
    lens, query_lens = [1000, 77, 0, 1300, 5, 640, 3000], [300, 1, 0, 17, 5, 128, 1]
    for head_dim, heads in ((64, 6), (128, 8), (128, 40)):
        shape = {"head_dim": head_dim, "block_size": block_size, "dtype": dtype}
        check(make_case(lens, query_lens, num_heads=heads, num_kv_heads=2, **dict([limit]), **shape))
        check(make_case([9000], [70], num_heads=heads, num_kv_heads=2, **dict([limit]), **shape))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_kernel_once_in_small_shapes(check: Callable[[PagedCase], Tensor], head_dim: int) -> None:
    """What the sanitizers run, which slow kernels down a hundredfold."""
    shape = {"head_dim": head_dim, "num_kv_heads": 2, "capacity": 4096, "block_size": 64}
    check(make_case([1, 300, 0, 530], [1, 1, 1, 1], num_heads=8, **shape))
    check(make_case([300, 40], [4, 1], num_heads=8, **shape))
    check(make_case([1100, 33, 0], [150, 1, 0], num_heads=8, **shape))
    check(make_case([200, 333], [130, 33], num_heads=6, window=100, **shape))
    check(make_case([200, 333, 90], [130, 33, 1], num_heads=6, chunk=50, **shape))
    check(make_case([700, 333], [70, 33], num_heads=6, **shape))


@pytest.mark.parametrize("query_len", [*range(1, 140, 3), 255, 256, 257, 300])
def test_a_chunk_of_any_length_over_a_prefix(check: Callable[[PagedCase], Tensor], query_len: int) -> None:
    for head_dim in (64, 128):
        check(
            make_case([query_len + 345, 9], [query_len, 1], head_dim=head_dim, block_size=64, seed=query_len)
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_whose_scores_dwarf_those_of_other_keys(
    check: Callable[[PagedCase], Tensor], dtype: torch.dtype, head_dim: int
) -> None:
    """What was summed so far must shrink, in some rows or in all, whatever order keys are visited in."""
    for lens, query_lens in (([1500], [900]), ([700, 5000, 333], [700, 40, 1])):
        case = make_case(lens, query_lens, head_dim=head_dim, block_size=64, dtype=dtype)
        num_blocks = case.key_cache.shape[0]
        case.key_cache.mul_(torch.linspace(0.1, 8, num_blocks, device=DEVICE).view(-1, 1, 1, 1))
        check(case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", [(40000,), (127, 128, 129, 16384), (5000,) * 3])
def test_long_contexts_are_joined_from_their_splits(
    check: Callable[[PagedCase], Tensor], dtype: torch.dtype, lens: tuple[int, ...]
) -> None:
    check(make_case(lens, [1] * len(lens), num_heads=32, num_kv_heads=8, dtype=dtype))
    check(
        make_case(lens, [1] * len(lens), num_heads=9, num_kv_heads=3, head_dim=64, dtype=dtype, window=3000)
    )


def test_a_chunk_over_a_long_prefix_is_joined_from_its_splits(check: Callable[[PagedCase], Tensor]) -> None:
    check(make_case([20000], [37], num_heads=32, num_kv_heads=8))
    check(make_case([9000, 4000], [64, 1], num_heads=6, num_kv_heads=2, head_dim=64))


def test_a_full_gpu_of_ragged_sequences(check: Callable[[PagedCase], Tensor]) -> None:
    lens = torch.randint(0, 1500, (256,)).tolist()
    check(make_case(lens, [1] * 256, num_heads=32, num_kv_heads=8, capacity=32768))


@pytest.mark.parametrize("query_len", [1, 4, 300])
def test_padding_rows_and_rows_beyond_the_batch_keep_what_they_held(query_len: int) -> None:
    case = make_case([400, 0, 0], [query_len, 1, 0], extra_tokens=3)
    paged_attention(*case)
    assert case.out[:query_len].isfinite().all()
    assert (case.out[query_len:] == CANARY).all()


def test_heads_beside_the_output_are_left_alone() -> None:
    case = make_case([400, 30], [1, 30])
    whole = torch.full((31, 24, 128), CANARY, dtype=torch.bfloat16, device=DEVICE)
    paged_attention(*case._replace(out=whole[:, 8:16]))
    assert whole[:, 8:16].isfinite().all()
    assert (whole[:, :8] == CANARY).all()
    assert (whole[:, 16:] == CANARY).all()


@pytest.mark.parametrize("lens,query_lens", [([900, 5000, 77], [1, 1, 1]), ([900, 700, 5000], [3, 500, 1])])
def test_a_row_has_the_same_bits_whatever_its_neighbours(lens: list[int], query_lens: list[int]) -> None:
    case = make_case(lens, query_lens, capacity=6000)
    expected, changed = run(case), case._replace(seq_lens=case.seq_lens.clone(), out=case.out.clone())
    changed.seq_lens[1:] = torch.tensor([0, 60], device=DEVICE)
    rows = slice(0, query_lens[0])
    assert torch.equal(run(changed)[rows], expected[rows])


@pytest.mark.parametrize("query_lens", [[1, 1], [1, 400]])
def test_repeated_runs_have_the_same_bits(query_lens: list[int]) -> None:
    case = make_case([30000, 900], query_lens, num_heads=32, num_kv_heads=8)
    expected = run(case)
    assert all(torch.equal(run(case), expected) for _ in range(50))


@pytest.mark.parametrize("head_dim,num_heads", [(128, 32), (64, 24), (256, 8)])
def test_a_captured_call_honours_grown_lengths_moved_blocks_and_a_smaller_batch(
    check: Callable[[PagedCase], Tensor], head_dim: int, num_heads: int
) -> None:
    shape = {"num_heads": num_heads, "num_kv_heads": 8, "head_dim": head_dim, "capacity": 20100}
    static = make_case([20000, 3, 500, 0], [1, 1, 1, 1], **shape)
    run(static)  # makes the workspace
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(*static)
    for seed, lens in enumerate(
        [[20000, 3, 500, 0], [1, 129, 15000, 400], [17, 0, 0, 0], [4000, 4000, 4001, 5000]]
    ):
        fresh = make_case(lens, [1] * 4, **shape, seed=seed + 1)
        blocks = fresh.key_cache.shape[0]
        for name in ("query", "block_tables", "seq_lens", "query_start_loc"):
            getattr(static, name).copy_(getattr(fresh, name))
        assert blocks <= static.key_cache.shape[0]
        static.key_cache[:blocks], static.value_cache[:blocks] = fresh.key_cache, fresh.value_cache
        static.out.fill_(torch.nan)
        graph.replay()
        expected = check(fresh)
        assert torch.equal(static.out.isnan(), expected.isnan())
        assert torch.equal(static.out.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_that_a_step_writes_are_not_read_before_they_are_written(head_dim: int) -> None:
    """Of pairs that share blocks: the second begins where the first one's new token completes a block."""
    pairs, length = 24, 192
    case = make_case([length, length + 1] * pairs, [1] * 2 * pairs, head_dim=head_dim, capacity=1024)
    tables, shared = case.block_tables, length // 16
    tables[1::2, :shared] = tables[::2, :shared]
    last = case.seq_lens.long() - 1
    slots = tables.gather(1, last[:, None] // 16)[:, 0] * 16 + last % 16
    slot_mapping, rows = slots.int(), torch.randn(len(slots), *case.key_cache.shape[2:], device=DEVICE)
    rows = rows.to(case.query.dtype)
    values = -rows
    long = torch.randn(1, 100_001, device=DEVICE)  # one block's work, which the writer of the cache waits for

    def step() -> None:
        rms_norm(long, long[0], 1e-5)
        write_kv_cache(rows, values, case.key_cache, case.value_cache, slot_mapping)
        paged_attention(*case)

    step()
    expected, graph = case.out.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(50):
        for cache in (case.key_cache, case.value_cache):
            cache[slots.long() // 16, slots.long() % 16] = torch.nan
        case.out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(case.out, expected)


def test_rows_that_do_not_start_at_multiples_of_16_bytes_are_refused() -> None:
    case = make_case([5], [1])
    odd = torch.zeros(1, 8, 129, dtype=torch.bfloat16, device=DEVICE)[..., 1:]
    with pytest.raises(ShapeError, match="query starts at"):
        select("paged_attention", device=DEVICE, dtype=torch.bfloat16, provider="cuda").call(
            *case._replace(query=odd)
        )


def test_head_dims_that_no_kernel_has_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="head_dim is 264"):
        run(make_case([5], [1], head_dim=264))
