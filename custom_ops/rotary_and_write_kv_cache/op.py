"""lamina::rotary_and_write_kv_cache, rotary positions and the store into the paged cache in one pass."""

import torch
from torch import Tensor

from .._shared.library import define_op
from .._shared.registry import Provider
from .._shared.triton_provider import triton_provider
from ..rotary_embedding.op import check_rotary
from ..write_kv_cache.op import check_write
from . import _cpu, _cuda, reference


def rotary_and_write_kv_cache(
    query: Tensor,  # [num_tokens, num_heads, head_dim], any strides
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim], any strides
    value: Tensor,  # like key
    cos: Tensor,  # [num_tokens, head_dim / 2], float32 (float64 for float64)
    sin: Tensor,  # like cos
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]; in int8 head_dim + 4
    value_cache: Tensor,  # like key_cache
    slot_mapping: Tensor,  # [num_tokens] int32: block * block_size + offset, or -1 for a padding row
    key_scale: float = 1.0,  # what keys are divided by where the cache is float8_e4m3fn
    value_scale: float = 1.0,
) -> Tensor:
    """The rotated query; the rotated key and the value go to their slots of the cache, -1 is skipped.

    A key is rounded to its own dtype before it is stored as write_kv_cache does it.
    """
    result: Tensor = torch.ops.lamina.rotary_and_write_kv_cache.default(
        query, key, value, cos, sin, key_cache, value_cache, slot_mapping, key_scale, value_scale
    )
    return result


def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    return query.new_empty(query.shape)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    op, caches = "rotary_and_write_kv_cache", (key_cache, value_cache)
    check_rotary(op, query, key, cos, sin)
    check_write(op, key, value, *caches, slot_mapping, key_scale, value_scale)


define_op(
    "rotary_and_write_kv_cache(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin,"
    " Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, float key_scale=1.0,"
    " float value_scale=1.0) -> Tensor",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        triton_provider("rotary_and_write_kv_cache", dtypes=_cuda.PROVIDER.dtypes),
        _cpu.PROVIDER,
        Provider(name="reference", load=lambda: reference.rotary_and_write_kv_cache),
    ),
)
