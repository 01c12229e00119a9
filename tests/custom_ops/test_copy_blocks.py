"""lamina::copy_blocks: the named blocks are copied, the others stay."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamina.common.errors import ShapeError
from lamina.custom_ops import copy_blocks

NUM_BLOCKS = 8


def caches(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [(torch.randn(NUM_BLOCKS, 4, 2, 8) * 50).to(dtype) for _ in range(2)]


def mapping(*pairs: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(pairs, dtype=torch.int32).view(len(pairs), 2)


@given(
    st.permutations(range(NUM_BLOCKS)),
    st.integers(0, NUM_BLOCKS // 2),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
)
def test_targets_equal_their_sources_and_nothing_else_changes(
    order: list[int], count: int, dtype: torch.dtype
) -> None:
    pairs = list(zip(order[:count], order[NUM_BLOCKS // 2 :], strict=False))
    written = caches(dtype)
    before = [cache.clone() for cache in written]
    copy_blocks(*written, mapping(*pairs))
    sources = {target: source for source, target in pairs}
    for cache, old in zip(written, before, strict=True):
        for block in range(NUM_BLOCKS):
            assert torch.equal(cache[block], old[sources.get(block, block)])


def test_one_block_may_be_copied_to_many() -> None:
    keys, values = caches()
    copy_blocks(keys, values, mapping((3, 0), (3, 1)))
    assert torch.equal(keys[0], keys[3])
    assert torch.equal(values[1], values[3])


@pytest.mark.parametrize(
    "change,message",
    [
        ({"value_cache": torch.zeros(8, 4, 2, 4)}, r"value_cache \[8, 4, 2, 4\]"),
        ({"value_cache": torch.zeros(8, 4, 2, 8).half()}, "value_cache .* torch.float16"),
        ({"key_cache": torch.zeros(8, 4, 4, 8)[:, :, ::2]}, "blocks are contiguous"),
        ({"block_mapping": torch.zeros(3, 2)}, r"wanted \[num_pairs, 2\] int32"),
        ({"block_mapping": torch.zeros(3, dtype=torch.int32)}, r"wanted \[num_pairs, 2\] int32"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, torch.Tensor], message: str) -> None:
    fitting = {"key_cache": torch.zeros(8, 4, 2, 8), "value_cache": torch.zeros(8, 4, 2, 8)}
    with pytest.raises(ShapeError, match=message):
        copy_blocks(**fitting | {"block_mapping": mapping((0, 1))} | change)


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.lamina.copy_blocks.default, (*caches(), mapping((0, 1), (2, 3))))
