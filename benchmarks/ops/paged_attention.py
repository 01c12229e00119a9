"""lamina::paged_attention beside its formula and beside torch's SDPA on gathered keys and values."""

import itertools
from typing import NamedTuple

import measure
import torch
import torch.nn.functional as F

from lamina.custom_ops._shared.registry import select

BLOCK_SIZE = 32
CACHED_BYTES = (
    1 << 27
)  # of keys and values that calls go through in turn, as layers do: more than a core's own


class Heads(NamedTuple):
    """The shape of a model's attention."""

    query: int
    kv: int
    dim: int


SMALL, LARGE = Heads(9, 3, 64), Heads(32, 8, 128)  # of SmolLM2 135M; of Llama 3 8B
DECODE = [(SMALL, batch, 100) for batch in (1, 8, 32)]
DECODE += [(heads, batch, 4096) for heads in (SMALL, LARGE) for batch in (1, 8)]
DECODE += [(heads, 1, 16384) for heads in (SMALL, LARGE)]
PREFILL = [512, 2048]


def make_arguments(heads: Heads, batch: int, context: int, query_len: int, dtype: torch.dtype) -> list:
    """A batch of equal sequences whose blocks lie anywhere."""
    blocks = -(-context // BLOCK_SIZE)
    tables = torch.randperm(batch * blocks).view(batch, blocks).int()
    caches = [torch.randn(batch * blocks, BLOCK_SIZE, heads.kv, heads.dim).to(dtype) for _ in range(2)]
    query = torch.randn(batch * query_len, heads.query, heads.dim).to(dtype)
    lens = torch.full((batch,), context, dtype=torch.int32)
    starts = torch.arange(batch + 1, dtype=torch.int32) * query_len
    scale = heads.dim**-0.5
    return [torch.empty_like(query), query, *caches, tables, lens, starts, query_len, scale, -1, -1, 0.0]


def sdpa(arguments: list, heads: Heads, batch: int, context: int, query_len: int) -> torch.Tensor:
    """What torch alone offers: gather the blocks, then scaled_dot_product_attention."""
    _, query, key_cache, value_cache, tables, *_ = arguments
    keys, values = (
        cache[tables.long()].flatten(1, 2)[:, :context].transpose(1, 2) for cache in (key_cache, value_cache)
    )
    query = query.view(batch, query_len, heads.query, heads.dim).transpose(1, 2)
    causal = query_len > 1
    return F.scaled_dot_product_attention(query, keys, values, is_causal=causal, enable_gqa=True)


def run_case(
    name: str, heads: Heads, batch: int, context: int, query_len: int, dtype: torch.dtype, rounds: int
) -> dict:
    """Times of one shape; bytes are what must be read of keys and values once."""
    size = 2 * batch * context * heads.kv * heads.dim * dtype.itemsize
    layers = [
        make_arguments(heads, batch, context, query_len, dtype) for _ in range(max(1, CACHED_BYTES // size))
    ]
    turns = itertools.cycle(layers[:64] if query_len == 1 else layers[:1])
    calls = {
        provider: select("paged_attention", device=torch.device("cpu"), dtype=dtype, provider=provider).call
        for provider in ("cpu", "reference")
    }
    contenders = {provider: lambda call=call: call(*next(turns)) for provider, call in calls.items()}
    contenders["gather + SDPA"] = lambda: sdpa(next(turns), heads, batch, context, query_len)
    if size > CACHED_BYTES // 8:
        del contenders["reference"]  # takes seconds
    times = measure.race(contenders, rounds)
    return {"name": f"{name} {str(dtype).removeprefix('torch.')}", "bytes": size, "microseconds": times}


def main() -> None:
    options = measure.arguments("paged_attention")
    cases = []
    for dtype in (torch.bfloat16, torch.float32):
        for heads, batch, context in DECODE:
            name = f"decode {batch} x {context}, {heads.query}/{heads.kv} x {heads.dim}"
            cases.append(run_case(name, heads, batch, context, 1, dtype, options.rounds))
        for length in PREFILL:
            rounds = max(3, options.rounds // 4)
            cases.append(run_case(f"prefill {length}", SMALL, 1, length, length, dtype, rounds))
    measure.report("paged_attention", options, cases)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
