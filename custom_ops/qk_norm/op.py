"""lamina::qk_norm, the norms of the heads of queries and keys in one step."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op
from .._shared.registry import Provider
from .._shared.triton_provider import triton_provider
from ..rms_norm.op import check_norm
from . import _cuda, reference


def qk_norm(
    query: Tensor,  # [num_tokens, num_heads, head_dim], any strides
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim], any strides
    query_weight: Tensor,  # [head_dim]
    key_weight: Tensor,  # like query_weight
    eps: float,
    zero_centred: bool,
) -> tuple[Tensor, Tensor]:
    """rms_norm of every head of query and key, contiguous; zero_centred: by weights kept less one."""
    result: tuple[Tensor, Tensor] = torch.ops.lamina.qk_norm.default(
        query, key, query_weight, key_weight, eps, zero_centred
    )
    return result


def _fake(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, zero_centred: bool
) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


def _check(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, zero_centred: bool
) -> None:
    if query.dim() != 3 or key.dim() != 3 or query.shape[::2] != key.shape[::2]:
        got = f"query is {list(query.shape)}, key {list(key.shape)}"
        raise ShapeError(f"qk_norm: {got}; wanted [T, heads, D] with the same T and D")
    if query.dtype != key.dtype:
        raise ShapeError(f"qk_norm: key is {key.dtype}; wanted query's {query.dtype}")
    check_norm("qk_norm", query, query_weight)
    check_norm("qk_norm", key, key_weight)


define_op(
    "qk_norm(Tensor query, Tensor key, Tensor query_weight, Tensor key_weight, float eps, bool zero_centred)"
    " -> (Tensor, Tensor)",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        triton_provider("qk_norm", dtypes=_cuda.PROVIDER.dtypes),
        Provider(name="reference", load=lambda: reference.qk_norm),
    ),
)
