"""Numbers of four bits in words of 32: against each format's rule, written out, and back again."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import ShapeError
from lamina.models.quantization.packing import AWQ_ORDER, IN_ORDER, pack_int4, unpack_int4

SHAPES = st.tuples(st.integers(1, 33), st.integers(1, 33))
ORDERS = st.sampled_from([IN_ORDER, AWQ_ORDER])


def numbers(shape: tuple[int, int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 16, shape, generator=generator, dtype=torch.int8)


def words_of_row(row: Sequence[int], order: Sequence[int]) -> list[int]:
    """A word at a time in Python's own whole numbers, as two's complement."""
    words = []
    for start in range(0, len(row), 8):
        eight = [*row[start : start + 8], *[0] * 8][:8]
        word = sum(eight[order[nibble]] << (4 * nibble) for nibble in range(8))
        words.append(word - (1 << 32) if word >> 31 else word)
    return words


@given(shape=SHAPES, seed=st.integers(0, 99), dim=st.sampled_from([0, 1]), order=ORDERS)
def test_words_are_those_of_the_rule_and_give_the_numbers_back(
    shape: tuple[int, int], seed: int, dim: int, order: tuple[int, ...]
) -> None:
    values = numbers(shape, seed)
    words = pack_int4(values, dim, order)
    rows = values if dim else values.T
    by_rule = torch.tensor([words_of_row(row, order) for row in rows.tolist()], dtype=torch.int32)
    assert words.is_contiguous()
    assert torch.equal(words, by_rule if dim else by_rule.T)
    again = unpack_int4(words, shape[dim], dim, order)
    assert again.dtype == torch.int8
    assert again.is_contiguous()
    assert torch.equal(again, values)


@given(shape=SHAPES, seed=st.integers(0, 99), dim=st.sampled_from([0, 1]))
def test_any_word_is_read_and_written_as_it_was(shape: tuple[int, int], seed: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).to(torch.int32)
    for order in (IN_ORDER, AWQ_ORDER):
        assert torch.equal(pack_int4(unpack_int4(words, 8 * shape[dim], dim, order), dim, order), words)


def test_awq_finds_column_j_of_eight_where_its_kernels_look_for_it() -> None:
    (word,) = pack_int4(torch.arange(8, dtype=torch.int8)[None], 1, AWQ_ORDER)[0].tolist()
    nibbles = [0, 4, 1, 5, 2, 6, 3, 7]  # of columns 0 to 7
    assert [(word >> (4 * nibble)) & 15 for nibble in nibbles] == list(range(8))


def test_the_zero_points_of_symmetric_gptq_are_the_words_known_of_it() -> None:
    assert pack_int4(torch.full((1, 8), 7, dtype=torch.int8), 1).item() == 0x77777777
    assert pack_int4(torch.full((8, 1), 8, dtype=torch.int8), 0).item() == 0x88888888 - (1 << 32)


@pytest.mark.parametrize("count", [0, 8, 17, 99])
def test_a_count_of_other_words_is_refused(count: int) -> None:
    with pytest.raises(ShapeError, match=rf"\(3, 2\).* hold 2 times 8 .*count is {count}"):
        unpack_int4(torch.zeros(3, 2, dtype=torch.int32), count, 1)


@given(shape=SHAPES, seed=st.integers(0, 99), dim=st.sampled_from([0, 1]))
def test_compressed_tensors_packs_the_same_words(shape: tuple[int, int], seed: int, dim: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    values = numbers(shape, seed)
    theirs = helpers.pack_to_int32(values - 8, 4, packed_dim=dim)
    assert torch.equal(theirs, pack_int4(values, dim))
