"""Paged attention inputs in which everything that must not be read is poison."""

import ctypes
import functools
import importlib
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.custom_ops.paged_attention.reference import oldest_visible
from lamina.custom_ops.write_kv_cache.int8_rows import to_int8

from . import host_kernels
from .paged_case import POISON_BLOCK, PagedCase, int32


def _make_case(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    window: int = -1,
    chunk: int = -1,
    soft_cap: float = 0.0,
    cache_dtype: torch.dtype | None = None,  # None: of the queries
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    seed: int = 0,
) -> PagedCase:
    generator = torch.Generator().manual_seed(seed)
    starts = [0, *itertools.accumulate(query_lens)]
    used = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(used) + 2
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    # query is a slice of a wider row, values lie in wider rows than keys: strides differ in every way
    wide_query = torch.full((starts[-1], num_heads + 2, head_dim), torch.nan, dtype=dtype)
    query = wide_query[:, 1 : num_heads + 1]
    query.copy_(torch.randn(query.shape, generator=generator) * 2)
    key_cache = torch.full((num_blocks, block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)
    value_cache = torch.full((num_blocks, block_size, num_kv_heads + 1, head_dim + 3), torch.nan, dtype=dtype)
    value_cache = value_cache[:, :, :num_kv_heads, :head_dim]
    tables = torch.full((len(seq_lens), max(used, default=0) + 2), POISON_BLOCK, dtype=torch.int32)
    for row, (length, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        oldest = oldest_visible(max(0, length - query_len), window, chunk)
        for index in range(oldest // block_size, used[row]):
            block = tables[row, index] = free.pop()
            filled = slice(max(0, oldest - index * block_size), min(block_size, length - index * block_size))
            for cache in (key_cache, value_cache):
                rows = cache[block, filled]
                rows.copy_(torch.randn(rows.shape, generator=generator))
    if cache_dtype == torch.int8:
        key_cache, value_cache = to_int8(key_cache), _in_place_of(to_int8(value_cache), cache_dtype)
    elif cache_dtype is not None:
        key_cache, value_cache = key_cache.to(cache_dtype), _in_place_of(value_cache, cache_dtype)
    out = torch.full((starts[-1], num_heads * 2, head_dim), torch.nan, dtype=dtype)[:, ::2]
    return PagedCase(
        out=out,
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=tables,
        seq_lens=int32(seq_lens),
        query_start_loc=int32(starts),
        max_query_len=max(query_lens, default=0),
        scale=head_dim**-0.5,
        window=window,
        chunk=chunk,
        soft_cap=soft_cap,
        key_scale=key_scale,
        value_scale=value_scale,
    )


def _in_place_of(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows in another dtype, in rows as wide as theirs."""
    poison = 85 if dtype == torch.int8 else torch.nan
    wide = torch.full((*rows.shape[:2], rows.shape[2] + 1, rows.shape[3] + 3), poison).to(dtype)
    narrow = wide[:, :, : rows.shape[2], : rows.shape[3]]
    narrow.copy_(rows)
    return narrow


@pytest.fixture(scope="module", autouse=True)
def _two_threads(two_threads: None) -> None:
    """For all of these tests."""


@pytest.fixture(scope="session")
def make_paged_case() -> Callable[..., PagedCase]:
    """make_paged_case(seq_lens, query_lens, **shape) -> arguments with NaN in all that must not be read."""
    return _make_case


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Callable[..., Any]]]:
    """on_host(op) -> the CUDA provider's call, with its kernel run here."""

    @functools.cache
    def load(op: str) -> Callable[..., Any]:
        entry = ctypes.CDLL(str(host_kernels.build(op, tmp_path_factory.mktemp("host")))).run

        class Kernel:
            def __init__(self, name: str, layout: str) -> None:
                self._arguments = struct.Struct(f"{layout}q")

            def __call__(self, device: torch.device, *fields: Any) -> None:
                entry(ctypes.c_char_p(self._arguments.pack(*fields, 0)))

        provider = importlib.import_module(f"lamina.custom_ops.{op}._cuda")
        patch.setattr(provider, "CudaKernel", Kernel)
        if op == "sample":
            patch.setattr(provider, "workspace", workspace)
        call: Callable[..., Any] = provider.load()
        return call

    with pytest.MonkeyPatch.context() as patch:
        yield load


@functools.cache
def workspace(device: torch.device, size: int) -> Tensor:
    """As lamina::sample has it: the same for the same size."""
    return torch.full((size,), torch.nan, device=device)
