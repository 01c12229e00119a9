"""The C++ kernel of lamina::paged_attention."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.cpu_kernel import DEVICES, DTYPES, CpuKernel
from .._shared.fp8 import FP8
from .._shared.registry import Provider
from ..write_kv_cache.int8_rows import INT8

_NOT_CONTIGUOUS = -2
STORED = {FP8: 1, INT8: 2}  # csrc/paged_attention/call.h has the same; others are as queries


def load() -> Callable[..., None]:
    """Build or load the kernel; the op's function on it."""
    kernel = CpuKernel("paged_attention", "36q3d")  # struct PagedAttentionArguments; always batch-invariant

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
        key_scale: float = 1.0,
        value_scale: float = 1.0,
        batch_invariant: bool = False,
    ) -> None:
        result = kernel(
            query.dtype,
            *(out.data_ptr(), *out.stride()),
            *(query.data_ptr(), *query.stride()),
            *(key_cache.data_ptr(), *key_cache.stride()),
            *(value_cache.data_ptr(), *value_cache.stride()),
            *(block_tables.data_ptr(), *block_tables.stride()),
            *(seq_lens.data_ptr(), query_start_loc.data_ptr()),
            *query.shape,
            *key_cache.shape,
            *block_tables.shape,
            *(window, chunk, torch.get_num_threads(), STORED.get(key_cache.dtype, 0)),
            *(scale * key_scale, soft_cap, value_scale),
        )
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


PROVIDER = Provider(name="cpu", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
