"""lamina::rotary_embedding, rotary positions applied to queries and keys."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op
from .._shared.precision import accumulation_dtype
from .._shared.registry import Provider
from .._shared.triton_provider import triton_provider
from . import _cuda, reference


def rotary_embedding(
    query: Tensor,  # [num_tokens, num_heads, head_dim], any strides
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim], any strides
    cos: Tensor,  # [num_tokens, head_dim / 2], float32 (float64 for float64)
    sin: Tensor,  # like cos
) -> tuple[Tensor, Tensor]:
    """(x1 * cos - x2 * sin, x2 * cos + x1 * sin) for the halves of every head, rounded once; contiguous."""
    result: tuple[Tensor, Tensor] = torch.ops.lamina.rotary_embedding.default(query, key, cos, sin)
    return result


def _fake(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


def check_rotary(op: str, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Refuse heads and angles that do not fit each other."""
    if query.dim() != 3 or key.dim() != 3 or query.shape[::2] != key.shape[::2]:
        got = f"query is {list(query.shape)}, key {list(key.shape)}"
        raise ShapeError(f"{op}: {got}; wanted [T, heads, D] with the same T and D")
    wanted = (query.shape[0], query.shape[2] // 2)
    if cos.shape != wanted or sin.shape != wanted or query.shape[2] % 2:
        got = f"cos is {list(cos.shape)}, sin {list(sin.shape)} for query {list(query.shape)}"
        raise ShapeError(f"{op}: {got}; wanted {list(wanted)} and an even head_dim")
    wide = accumulation_dtype(query.dtype)
    if key.dtype != query.dtype or cos.dtype != wide or sin.dtype != wide:
        got = f"key is {key.dtype}, cos {cos.dtype}, sin {sin.dtype} for query {query.dtype}"
        raise ShapeError(f"{op}: {got}; wanted query's dtype for key and {wide} for cos and sin")


def _check(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_rotary("rotary_embedding", query, key, cos, sin)


define_op(
    "rotary_embedding(Tensor query, Tensor key, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        triton_provider("rotary_embedding", dtypes=_cuda.PROVIDER.dtypes),
        Provider(name="reference", load=lambda: reference.rotary_embedding),
    ),
)
