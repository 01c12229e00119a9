"""lamina::write_kv_cache, which stores a step's keys and values in the paged cache by its slot mapping."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op, no_result
from .._shared.registry import Provider
from .._shared.triton_provider import triton_provider
from . import _cpu, _cuda, reference
from .int8_rows import cache_width
from .stored import check_stored


def write_kv_cache(
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim], last dimension contiguous
    value: Tensor,  # like key, its strides may differ
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]; in int8 head_dim + 4
    value_cache: Tensor,  # like key_cache
    slot_mapping: Tensor,  # [num_tokens] int32: block * block_size + offset, or -1 for a padding row
    key_scale: float = 1.0,  # what keys are divided by where the cache is float8_e4m3fn
    value_scale: float = 1.0,
) -> None:
    """cache[slot // block_size, slot % block_size] = row for keys and values; slot -1 is skipped.

    A cache in float8_e4m3fn takes row / scale, clamped to +-448 and rounded to the nearest, ties to even. One
    in int8 takes each head of a token as whole numbers with a float32 behind them, their scale.
    """
    torch.ops.lamina.write_kv_cache.default(
        key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale
    )


def check_write(
    op: str,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float,
    value_scale: float,
) -> None:
    """Refuse rows, caches, slots and scales that do not fit each other."""
    equal = key.shape == value.shape and key_cache.shape == value_cache.shape
    if not equal or key_cache.dim() != 4 or key_cache.shape[2:] != _stored_shape(key, key_cache):
        got = f"key is {list(key.shape)}, value {list(value.shape)}"
        raise ShapeError(
            f"{op}: {got}, caches {list(key_cache.shape)}, {list(value_cache.shape)};"
            " wanted [T, kv_heads, D] twice and [blocks, block_size, kv_heads, D] twice, D + 4 in int8"
        )
    if slot_mapping.dtype != torch.int32 or slot_mapping.shape != key.shape[:1]:
        got = f"slot_mapping is {list(slot_mapping.shape)} {slot_mapping.dtype}"
        raise ShapeError(f"{op}: {got}; wanted [{key.shape[0]}] int32")
    check_stored(op, (key.dtype, value.dtype), (key_cache, value_cache), (key_scale, value_scale))
    if not slot_mapping.is_contiguous():
        raise ShapeError(f"{op}: wanted slot_mapping contiguous")


def _stored_shape(key: Tensor, cache: Tensor) -> tuple[int, ...]:
    """Heads and elements of a token in the cache; bytes that are only moved have no scale."""
    heads, head_dim = key.shape[1:]
    return heads, head_dim if key.dtype == cache.dtype else cache_width(head_dim, cache.dtype)


def _check(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    caches = key_cache, value_cache
    check_write("write_kv_cache", key, value, *caches, slot_mapping, key_scale, value_scale)


define_op(
    "write_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,"
    " Tensor slot_mapping, float key_scale=1.0, float value_scale=1.0) -> ()",
    fake=no_result,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        triton_provider("write_kv_cache"),
        _cpu.PROVIDER,
        Provider(name="reference", load=lambda: reference.write_kv_cache),
    ),
)
