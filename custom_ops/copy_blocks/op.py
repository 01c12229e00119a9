"""lamina::copy_blocks, whole blocks of the paged cache copied to other blocks of it."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op, no_result
from .._shared.registry import Provider
from .._shared.triton_provider import triton_provider
from . import _cuda, reference


def copy_blocks(
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], each block contiguous
    value_cache: Tensor,  # like key_cache
    block_mapping: Tensor,  # [num_pairs, 2] int32: from, to
) -> None:
    """cache[to] = cache[from] for keys and values; no block is written twice, or both read and written."""
    torch.ops.lamina.copy_blocks.default(key_cache, value_cache, block_mapping)


def _check(key_cache: Tensor, value_cache: Tensor, block_mapping: Tensor) -> None:
    if key_cache.dim() != 4 or value_cache.shape != key_cache.shape or value_cache.dtype != key_cache.dtype:
        got = f"key_cache is {list(key_cache.shape)} {key_cache.dtype}"
        other = f"value_cache {list(value_cache.shape)} {value_cache.dtype}"
        raise ShapeError(f"copy_blocks: {got}, {other}; wanted [blocks, block_size, kv_heads, D] twice")
    if not all(cache[:1].is_contiguous() for cache in (key_cache, value_cache)):
        raise ShapeError("copy_blocks: wanted caches whose blocks are contiguous")
    if block_mapping.dtype != torch.int32 or block_mapping.dim() != 2 or block_mapping.shape[1] != 2:
        got = f"block_mapping is {list(block_mapping.shape)} {block_mapping.dtype}"
        raise ShapeError(f"copy_blocks: {got}; wanted [num_pairs, 2] int32")


define_op(
    "copy_blocks(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor block_mapping) -> ()",
    fake=no_result,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        triton_provider("copy_blocks"),
        Provider(name="reference", load=lambda: reference.copy_blocks),
    ),
)
