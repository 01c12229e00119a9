"""Which sizes of mixed steps are captured: the same at every start, and none that no step can have."""

from types import SimpleNamespace
from typing import Any

import pytest

from lamina.runtime.startup.captures import MIXED_SIZES, graph_sizes

TILE = 128  # rows of x in a GEMM's tile


def mixed_sizes(most_tokens: int) -> tuple[int, ...]:
    resolved: Any = SimpleNamespace(max_num_seqs=64, max_num_batched_tokens=most_tokens)  # all that is read
    return graph_sizes(resolved)[1]


@pytest.mark.parametrize("num_tokens", [129, 300, 513, 1000, 1025, 1408, 1537, 2048])
def test_padding_ends_with_the_tile_that_a_gemm_computes_anyway(num_tokens: int) -> None:
    size = next(size for size in mixed_sizes(8192) if size >= num_tokens)
    assert size - num_tokens < TILE


@pytest.mark.parametrize("most", [16, 100, 512, 2000])
def test_no_size_is_captured_that_no_step_has(most: int) -> None:
    assert mixed_sizes(most) == tuple(size for size in MIXED_SIZES if size <= most)
