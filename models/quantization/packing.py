"""Numbers of four bits in words of 32, as checkpoints pack them: eight along a dimension, in an order."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...common.errors import ShapeError

IN_ORDER = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    7,
)  # compressed-tensors and GPTQ: bits 4i to 4i + 3 hold number i of the eight
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ's gemm: bits 4i to 4i + 3 hold number AWQ_ORDER[i]
PER_WORD = 8


def pack_int4(values: Tensor, dim: int, order: Sequence[int] = IN_ORDER) -> Tensor:
    """int32, a word for each eight `values` [R, C] from 0 to 15 along `dim`; a short last word ends in zeros.

    `order[i]` is which of a word's eight numbers its bits 4i to 4i + 3 hold. compressed-tensors packs weights
    [N, K] along 1 and zero points [N, G] along 0; GPTQ weights [K, N] along 0 and zero points [G, N] along 1;
    AWQ both along 1 by AWQ_ORDER.
    """
    columns = _columns(values, dim)
    num_words = -(-columns.shape[1] // PER_WORD)
    words = torch.zeros(columns.shape[0], num_words, dtype=torch.int32, device=values.device)
    for nibble, place in enumerate(order):
        taken = columns[:, place::PER_WORD]
        words[:, : taken.shape[1]] |= taken.to(torch.int32) << (4 * nibble)
    return words if dim else words.T.contiguous()


def unpack_int4(words: Tensor, count: int, dim: int, order: Sequence[int] = IN_ORDER) -> Tensor:
    """int8, the `count` numbers from 0 to 15 along `dim` that int32 `words` [R, C] hold: pack_int4 undone.

    ShapeError for a count that needs more words than there are, or fewer.
    """
    columns = _columns(words, dim)
    if -(-count // PER_WORD) != columns.shape[1]:
        raise ShapeError(
            f"words are {tuple(words.shape)}, which hold {columns.shape[1]} times {PER_WORD} numbers along "
            f"{dim}, and count is {count}; wanted a count of as many words"
        )
    values = torch.empty(*columns.shape, PER_WORD, dtype=torch.int8, device=words.device)
    for nibble, place in enumerate(order):
        values[:, :, place] = (columns >> (4 * nibble)) & 15
    values = values.flatten(1)[:, :count]
    return values.contiguous() if dim else values.T.contiguous()


def _columns(matrix: Tensor, dim: int) -> Tensor:
    """The matrix with what is packed in its columns."""
    return matrix if dim else matrix.T
