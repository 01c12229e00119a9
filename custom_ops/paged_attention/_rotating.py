"""Decode attention on CUDA that rotates queries and keys and writes the cache in its own launch.

To the bit what rotary_and_write_kv_cache and then paged_attention give, a launch and two waits less a layer.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .._shared.cuda_kernel import CudaKernel
from .._shared.fp8 import FP8
from .._shared.layout import with_dense_heads
from ._arguments import LAYOUT, check, check_rows, packed
from ._plan import FEW_ROWS, MANY

ROTATING_LAYOUT = f"{LAYOUT}10qd"  # of struct RotatingAttentionArguments, without the stream
SOURCE, FP8_SOURCE = "rotary", "rotary_fp8"  # csrc/paged_attention/<source>.cu
DTYPES = frozenset({torch.bfloat16, torch.float16})
HEAD_DIMS = (64, 128)


def serves(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether there is a kernel for queries of this kind."""
    return dtype in DTYPES and head_dim in HEAD_DIMS


def holds(query: Tensor, key: Tensor, scale: float, soft_cap: float) -> bool:
    """Whether a block has room for the query heads [T, num_heads, head_dim] of a key-value head."""
    del scale, soft_cap  # any
    return query.shape[1] <= FEW_ROWS[-1] * key.shape[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class RotatingDecode:
    """A kernel that rotates, and whether it takes queries, keys, a scale and a soft cap."""

    attend: Callable[..., None]
    holds: Callable[[Tensor, Tensor, float, float], bool]


def find(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> RotatingDecode | None:
    """The kernel for queries and a cache of these dtypes, built or loaded; None where there is none."""
    if not serves(dtype, head_dim):
        return None
    return RotatingDecode(attend=load(is_fp8=cache_dtype == FP8), holds=holds)


def load(*, is_fp8: bool = False) -> Callable[..., None]:
    """Build or load the kernel over caches in the queries' dtype or in FP8; a function on it."""
    source = FP8_SOURCE if is_fp8 else SOURCE
    return functools.partial(attend, CudaKernel("paged_attention", ROTATING_LAYOUT, source), source)


def attend(
    kernel: Callable[..., None],
    source: str,
    out: Tensor,  # [num_tokens, num_heads, head_dim], written in place
    query: Tensor,  # like out
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor,  # like key
    cos: Tensor,  # [num_tokens, head_dim / 2] float32
    sin: Tensor,  # like cos
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,  # [num_tokens] int32: the last place of the token's sequence; -1: it has no keys
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int,
    chunk: int,
    soft_cap: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Write out, and the rotated keys and the values to their slots; each sequence has one token or none."""
    query, key, value = with_dense_heads(query), with_dense_heads(key), with_dense_heads(value)
    cos, sin = cos.contiguous(), sin.contiguous()
    check(out, query, key_cache, value_cache, block_tables)
    check_rows(out, query, key_cache, value_cache, key=key, value=value, cos=cos, sin=sin)
    own_scales = (key_scale, value_scale) if key_cache.dtype == FP8 else (1.0, 1.0)
    launches = packed(
        source,
        MANY,
        out,
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        1,
        scale,
        window,
        chunk,
        soft_cap,
        *own_scales,
    )
    rotation = (
        *(key.data_ptr(), *key.stride()[:2]),
        *(value.data_ptr(), *value.stride()[:2]),
        *(cos.data_ptr(), sin.data_ptr(), slot_mapping.data_ptr()),
        key_scale,
    )
    for fields in launches:
        kernel(query.device, *fields, 0, *rotation)
