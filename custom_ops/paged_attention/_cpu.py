"""The C++ kernel of lamina::paged_attention."""

import ctypes
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from ...common.errors import ShapeError
from ..build import load_kernel
from ..registry import Provider

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

# struct PagedAttentionArguments; one packed argument costs a tenth of thirty converted by ctypes
_ARGUMENTS = struct.Struct("28q2d")


def load() -> Callable[..., None]:
    """The kernel behind the op's signature."""
    library = load_kernel("paged_attention")
    assert library.paged_attention_arguments_size() == _ARGUMENTS.size
    entries = {dtype: getattr(library, f"paged_attention_{name}") for dtype, name in NAMES.items()}
    for entry in entries.values():
        entry.argtypes, entry.restype = [ctypes.c_char_p], ctypes.c_int64

    def paged_attention(
        out: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        max_query_len: int,
        scale: float,
        window: int,
        soft_cap: float,
    ) -> None:
        num_tokens, num_heads, head_dim = query.shape
        num_blocks, block_size, num_kv_heads, _ = key_cache.shape
        num_seqs, max_blocks = block_tables.shape
        arguments = _ARGUMENTS.pack(
            *(out.data_ptr(), *out.stride()[:2]),
            *(query.data_ptr(), *query.stride()[:2]),
            *(key_cache.data_ptr(), *key_cache.stride()[:3]),
            *(value_cache.data_ptr(), *value_cache.stride()[:3]),
            *(block_tables.data_ptr(), block_tables.stride()[0], max_blocks),
            *(seq_lens.data_ptr(), query_start_loc.data_ptr()),
            *(num_tokens, num_seqs, num_heads, num_kv_heads, head_dim),
            *(num_blocks, block_size, window, torch.get_num_threads()),
            *(scale, soft_cap),
        )
        invalid = entries[query.dtype](arguments)
        if invalid >= 0:
            raise ShapeError(_describe(invalid, key_cache, block_tables, seq_lens, query_start_loc))

    return paged_attention


def _describe(row: int, cache: Tensor, tables: Tensor, seq_lens: Tensor, query_start_loc: Tensor) -> str:
    first, last = query_start_loc[row : row + 2].tolist()
    return (
        f"paged_attention: sequence {row} has seq_len {seq_lens[row].item()}, query rows {first} to {last},"
        f" blocks {tables[row].tolist()}; wanted query_len <= seq_len, rows inside query,"
        f" and enough blocks, each from 0 to {cache.shape[0] - 1}"
    )


PROVIDER = Provider(name="cpu", load=load, devices=frozenset({"cpu"}), dtypes=frozenset(NAMES))
