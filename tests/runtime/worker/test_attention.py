"""attend in serving: with angles it rotates by itself, and nothing else changes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lamina.custom_ops import rotary_embedding
from lamina.models import AttentionSpec
from lamina.runtime.worker.attention import PagedAttention, allocate_caches, select_backend

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 16, 4


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attention_of(dtype: torch.dtype) -> tuple[PagedAttention, Any]:
    """Attention over a sequence of three tokens, then one of two behind two that are computed."""
    shape = {"head_dim": HEAD_DIM, "block_size": BLOCK_SIZE}
    backend = select_backend("auto", device=CPU, dtype=dtype, **shape)
    caches = allocate_caches(
        num_layers=1, num_blocks=4, num_kv_heads=KV_HEADS, dtype=dtype, device=CPU, **shape
    )
    for cache in caches[0]:
        cache.fill_(1.0)
    attention = PagedAttention(backend, caches, [AttentionSpec(scale=HEAD_DIM**-0.5)])
    batch: Any = SimpleNamespace(
        slot_mappings=(int32(4, 5, 6, 10, 11),),
        block_tables=(int32(1, 2).view(2, 1),),
        seq_lens=int32(3, 4),
        query_start_loc=int32(0, 3, 5),
        max_query_len=3,
    )
    attention.begin(batch)
    return attention, caches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_with_angles_it_rotates_query_and_key_itself(dtype: torch.dtype) -> None:
    qkv = torch.randn(5, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
    query, key, value = qkv[:, :HEADS], qkv[:, HEADS:-KV_HEADS], qkv[:, -KV_HEADS:]
    angles = torch.rand(5, HEAD_DIM // 2) * 9
    cos, sin = angles.cos(), angles.sin()
    given = qkv.clone()
    expected, out = (torch.empty(5, HEADS, HEAD_DIM, dtype=dtype) for _ in range(2))
    attend, caches = attention_of(dtype)
    attend(0, *rotary_embedding(query, key, cos, sin), value, expected)
    rotating, rotated_caches = attention_of(dtype)
    rotating(0, query, key, value, out, cos, sin)
    assert torch.equal(out, expected)
    assert torch.equal(qkv, given)
    for ours, theirs in zip(rotated_caches[0], caches[0], strict=True):
        assert torch.equal(ours, theirs)
