"""The arguments of lamina::paged_attention, as tests vary them on a CPU and on a GPU."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.custom_ops.write_kv_cache.int8_rows import INT8, from_int8

POISON_BLOCK = 2**30  # an index that no kernel may follow


class PagedCase(NamedTuple):
    """The arguments of lamina::paged_attention, in order."""

    out: Tensor
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    scale: float
    window: int
    chunk: int
    soft_cap: float
    key_scale: float = 1.0
    value_scale: float = 1.0

    def widened(self, dtype: torch.dtype) -> "PagedCase":
        """The same with caches of numbers in this dtype."""
        if self.key_cache.dtype == INT8:
            caches = (from_int8(cache, dtype) for cache in (self.key_cache, self.value_cache))
            return self._replace(**dict(zip(("key_cache", "value_cache"), caches, strict=True)))
        return self._replace(
            key_cache=self.key_cache.to(dtype) * self.key_scale,
            value_cache=self.value_cache.to(dtype) * self.value_scale,
            key_scale=1.0,
            value_scale=1.0,
        )

    def to(self, dtype: torch.dtype) -> "PagedCase":
        """The same values in another dtype, caches too, with an output of their own."""
        out = torch.full(self.out.shape, torch.nan, dtype=dtype, device=self.out.device)
        return self.widened(dtype)._replace(out=out, query=self.query.to(dtype))

    def alone(self, sequence: int) -> "PagedCase":
        """One sequence of the batch, on the same caches."""
        first, last = self.query_start_loc[sequence : sequence + 2].tolist()
        return self._replace(
            out=torch.full_like(self.out[first:last], torch.nan),
            query=self.query[first:last],
            block_tables=self.block_tables[sequence : sequence + 1],
            seq_lens=self.seq_lens[sequence : sequence + 1],
            query_start_loc=int32([0, last - first], self.out.device),
            max_query_len=last - first,
        )


def int32(values: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """An int32 tensor."""
    return torch.tensor(values, dtype=torch.int32, device=device)
