"""Steps of one token a sequence amid poison, for attention that rotates and writes the cache itself."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

DTYPE, POISON_BLOCK = torch.bfloat16, 2**28


class Step(NamedTuple):
    """A step of one token a sequence."""

    query: Tensor
    key: Tensor
    value: Tensor
    cos: Tensor
    sin: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor

    def copied(self) -> "Step":
        """The same with caches of its own."""
        return self._replace(key_cache=self.key_cache.clone(), value_cache=self.value_cache.clone())


def make_step(
    lens: list[int],
    *,
    head_dim: int = 64,
    group: int = 4,
    kv_heads: int = 2,
    block_size: int = 16,
    shared: dict[int, int] | None = None,  # of a sequence, the one whose blocks it begins with
    width: int = 0,
    seed: int = 0,
) -> Step:
    """Random numbers; NaN in all of the cache that no earlier step wrote."""
    shared = shared or {}
    torch.manual_seed(seed)
    used = [-(-length // block_size) for length in lens]
    tables = torch.full((len(lens), max([width, *used]) + 1), POISON_BLOCK, dtype=torch.int32)
    fresh = itertools.count(1)
    for seq in sorted(range(len(lens)), key=lambda seq: seq in shared):
        own = [next(fresh) for _ in range(used[seq])]
        if seq in shared:
            num_shared = (lens[seq] - 1) // block_size
            own[:num_shared] = tables[shared[seq], :num_shared].tolist()
        tables[seq, : used[seq]] = torch.tensor(own, dtype=torch.int32)
    num_blocks = next(fresh)
    caches = [torch.full((num_blocks, block_size, kv_heads, head_dim), torch.nan, dtype=DTYPE) for _ in "kv"]
    slots = [-1] * len(lens)
    for seq, length in enumerate(lens):
        if length == 0:
            continue
        places = [int(tables[seq, at // block_size]) * block_size + at % block_size for at in range(length)]
        slots[seq] = places[-1]
        for cache in caches:
            rows = cache.view(-1, kv_heads, head_dim)
            unset = [place for place in places[:-1] if rows[place].isnan().any()]
            rows[unset] = torch.randn(len(unset), kv_heads, head_dim).to(DTYPE)
    for slot in [slot for slot in slots if slot >= 0]:  # of this step, whoever else sees them
        for cache in caches:
            cache.view(-1, kv_heads, head_dim)[slot] = torch.nan
    live = sum(length > 0 for length in lens)
    assert all(lens[:live]), "padding comes last"
    heads = kv_heads * group
    qkv = torch.randn(len(lens), heads + 2 * kv_heads, head_dim).to(DTYPE)
    angles = torch.rand(len(lens), head_dim // 2) * 6.3
    starts = torch.tensor([min(seq, live) for seq in range(len(lens) + 1)], dtype=torch.int32)
    return Step(
        *(qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]),
        *(angles.cos(), angles.sin(), *caches, torch.tensor(slots, dtype=torch.int32), tables),
        *(torch.tensor(lens, dtype=torch.int32), starts),
    )
