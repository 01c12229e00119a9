"""The Triton kernels of lamina::paged_attention on a few shapes, since each costs a compilation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.custom_ops._shared.registry import select

from .paged_cases import CANARY, DEVICE, PagedCase, exact, make_case, naive

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def run(case: PagedCase) -> Tensor:
    """What the kernels write over poison."""
    case.out.fill_(torch.nan)
    select("paged_attention", device=DEVICE, dtype=case.query.dtype, provider="triton").call(*case)
    return case.out.clone()


@pytest.fixture(scope="session")
def check(assert_close_to_reference: Callable[..., None]) -> Callable[[PagedCase], Tensor]:
    """check(case) -> the kernels' output, which errs at most twice as much as the naive version."""

    def compare(case: PagedCase) -> Tensor:
        out, expected = run(case), exact(case)
        written = expected.isfinite()
        assert torch.equal(out.isfinite(), written), "rows written or left alone wrongly, or poison was read"
        assert_close_to_reference(out[written], expected[written], naive(case)[written], floor=4e-6)
        return out

    return compare


SHAPES: dict[str, dict[str, Any]] = {
    "8B": {"num_heads": 32, "num_kv_heads": 8},
    "1B": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 64},
    "groups of 3": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "block_size": 32},
    "groups of 16": {"num_heads": 16, "num_kv_heads": 1, "head_dim": 80},
    "groups of 20": {"num_heads": 20, "num_kv_heads": 1, "head_dim": 96, "block_size": 24},
    "wide heads": {"num_heads": 4, "num_kv_heads": 4, "head_dim": 256, "block_size": 64},
    "window": {"num_heads": 8, "num_kv_heads": 2, "window": 100},
    "chunk": {"num_heads": 8, "num_kv_heads": 2, "chunk": 100},
    "soft cap": {"num_heads": 8, "num_kv_heads": 2, "soft_cap": 30.0},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_decode_prefill_and_mixed_batches_err_no_more_than_twice_the_plain_version(
    check: Callable[[PagedCase], Tensor], dtype: torch.dtype, shape: dict[str, Any]
) -> None:
    check(make_case([1, 700, 0, 64, 1029], [1, 1, 1, 1, 1], **shape, dtype=dtype))
    check(make_case([300, 40, 0, 777], [300, 1, 0, 200], **shape, dtype=dtype))
    check(make_case([5000], [1], **shape, dtype=dtype))  # split
    check(make_case([17] * 300, [1] * 300, **shape, dtype=dtype))  # not split


def test_padding_rows_and_rows_beyond_the_batch_keep_what_they_held() -> None:
    call = select("paged_attention", device=DEVICE, dtype=torch.bfloat16, provider="triton").call
    for capacity in (0, 20000):
        case = make_case([400, 0, 0], [4, 1, 0], extra_tokens=3, capacity=capacity)
        call(*case)
        assert case.out[:4].isfinite().all()
        assert (case.out[4:] == CANARY).all()


def test_a_captured_call_honours_grown_lengths_and_a_smaller_batch(
    check: Callable[[PagedCase], Tensor],
) -> None:
    static = make_case([4000, 4000, 4000], [1, 1, 1], capacity=4096)
    run(static)
    call = select("paged_attention", device=DEVICE, dtype=torch.bfloat16, provider="triton").call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(*static)
    for seq_lens in ([1, 4000, 129], [3000, 0, 17], [4000, 4000, 4000]):
        static.seq_lens.copy_(torch.tensor(seq_lens))
        static.out.fill_(torch.nan)
        graph.replay()
        expected = check(static._replace(out=static.out.clone()))
        assert torch.equal(static.out.isnan(), expected.isnan())
        assert torch.equal(static.out.nan_to_num(), expected.nan_to_num())
