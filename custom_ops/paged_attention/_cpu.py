"""The C++ kernel of lamina::paged_attention."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from ...common.errors import ShapeError
from ..build import load_kernel
from ..registry import Provider

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_ARGUMENTS = [
    *(_POINTER, _INT, _INT),  # out
    *(_POINTER, _INT, _INT),  # query
    *(_POINTER, _INT, _INT, _INT),  # key_cache
    *(_POINTER, _INT, _INT, _INT),  # value_cache
    *(_POINTER, _INT, _INT),  # block_tables, its stride, max_blocks
    *(_POINTER, _POINTER),  # seq_lens, query_start_loc
    *(_INT, _INT, _INT, _INT, _INT),  # num_tokens, num_seqs, num_heads, num_kv_heads, head_dim
    *(_INT, _INT),  # num_blocks, block_size
    *(_DOUBLE, _INT, _DOUBLE, _INT),  # scale, window, soft_cap, threads
]


def load() -> Callable[..., None]:
    """The kernel behind the op's signature."""
    library = load_kernel("paged_attention")
    entries = {dtype: getattr(library, f"paged_attention_{name}") for dtype, name in NAMES.items()}
    for entry in entries.values():
        entry.argtypes, entry.restype = _ARGUMENTS, _INT

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
        invalid = entries[query.dtype](
            *(out.data_ptr(), *out.stride()[:2]),
            *(query.data_ptr(), *query.stride()[:2]),
            *(key_cache.data_ptr(), *key_cache.stride()[:3]),
            *(value_cache.data_ptr(), *value_cache.stride()[:3]),
            *(block_tables.data_ptr(), block_tables.stride(0), max_blocks),
            *(seq_lens.data_ptr(), query_start_loc.data_ptr()),
            *(num_tokens, num_seqs, num_heads, num_kv_heads, head_dim),
            *(num_blocks, block_size),
            *(scale, window, soft_cap, torch.get_num_threads()),
        )
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
