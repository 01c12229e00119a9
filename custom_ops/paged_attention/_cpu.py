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
_ARGUMENTS = struct.Struct("35q2d")

_NOT_CONTIGUOUS = -2


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
        chunk: int,
        soft_cap: float,
    ) -> None:
        arguments = _ARGUMENTS.pack(
            *(out.data_ptr(), *out.stride()),
            *(query.data_ptr(), *query.stride()),
            *(key_cache.data_ptr(), *key_cache.stride()),
            *(value_cache.data_ptr(), *value_cache.stride()),
            *(block_tables.data_ptr(), *block_tables.stride()),
            *(seq_lens.data_ptr(), query_start_loc.data_ptr()),
            *query.shape,
            *key_cache.shape,
            *block_tables.shape,
            *(window, chunk, torch.get_num_threads()),
            *(scale, soft_cap),
        )
        result = entries[query.dtype](arguments)
        if result == _NOT_CONTIGUOUS:
            raise ShapeError("paged_attention: wanted tensors whose last dimension is contiguous")
        if result >= 0:
            raise ShapeError(_describe(result, key_cache, block_tables, seq_lens, query_start_loc))

    return paged_attention


def _describe(row: int, cache: Tensor, tables: Tensor, seq_lens: Tensor, query_start_loc: Tensor) -> str:
    first, last = query_start_loc[row : row + 2].tolist()
    return (
        f"paged_attention: sequence {row} has seq_len {seq_lens[row].item()}, query rows {first} to {last},"
        f" blocks {tables[row].tolist()}; wanted query_len <= seq_len, rows inside query,"
        f" and enough blocks, each from 0 to {cache.shape[0] - 1}"
    )


PROVIDER = Provider(name="cpu", load=load, devices=frozenset({"cpu"}), dtypes=frozenset(NAMES))
