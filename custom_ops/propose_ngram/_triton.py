"""The Triton kernel of lamina::propose_ngram: a program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def token_at(tokens, table, place, block_size, end, newest, mask):
    """The tokens at these places of a row, of which the one at its end lies in no block."""
    inside = mask & (place < end)
    block = tl.load(table + place // block_size, mask=inside, other=0).to(tl.int64)
    found = tl.load(tokens + block * block_size + place % block_size, mask=inside, other=0)
    return tl.where(place < end, found, newest)


@triton.jit
def propose_ngram_kernel(
    tokens,
    block_size,
    block_tables,
    table_stride,
    num_computed,
    newest_tokens,
    out,
    k,
    min_ngram,
    max_ngram,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    end, newest = tl.load(num_computed + row), tl.load(newest_tokens + row)
    table = block_tables + row * table_stride
    best = tl.zeros((), tl.int64)  # the length of the best match, then its place
    for first in range(0, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        matches = place < end
        length = tl.zeros((BLOCK,), tl.int64)
        for back in range(max_ngram):
            wanted = token_at(tokens, table, tl.maximum(end - back, 0), block_size, end, newest, True)
            matches = matches & (place >= back)
            found = token_at(tokens, table, tl.maximum(place - back, 0), block_size, end, newest, matches)
            matches = matches & (found == wanted)
            length += matches.to(tl.int64)
        best = tl.maximum(best, tl.max((length << 32) | place.to(tl.int64), axis=0))
    place, is_found = (best & 0xFFFFFFFF).to(tl.int32), (best >> 32) >= min_ngram
    columns = tl.arange(0, WIDTH)
    after = place + 1 + columns % tl.maximum(end - place, 1)
    drafts = token_at(tokens, table, after, block_size, end, newest, (columns < k) & is_found)
    tl.store(out + row * k + columns, tl.where(is_found, drafts, -1), mask=columns < k)


def propose_ngram(
    tokens: Tensor,
    block_tables: Tensor,
    num_computed: Tensor,
    newest: Tensor,
    min_ngram: int,
    max_ngram: int,
    out: Tensor,
) -> None:
    """The op, as op.py states it."""
    if not out.numel():
        return
    rows, k = out.shape
    with torch.cuda.device_of(tokens):
        propose_ngram_kernel[(rows,)](
            *(tokens, tokens.shape[1], block_tables, block_tables.stride(0), num_computed, newest, out),
            *(k, min_ngram, max_ngram),
            BLOCK=BLOCK,
            WIDTH=triton.next_power_of_2(k),
        )
