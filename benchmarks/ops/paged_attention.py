"""lamina::paged_attention beside its formula, SDPA on gathered keys and values, and as much read in order."""

import itertools
from typing import NamedTuple

import measure
import torch
import torch.nn.functional as F

from lamina.common.pages import advise_huge_pages
from lamina.custom_ops._shared.registry import select
from lamina.custom_ops.write_kv_cache.int8_rows import SCALE_BYTES, to_int8

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


def in_huge_pages(cache: torch.Tensor) -> torch.Tensor:
    """A copy in memory as a runtime's cache has it."""
    copy = torch.empty(cache.shape, dtype=cache.dtype)
    advise_huge_pages(copy.data_ptr(), copy.nbytes)
    return copy.copy_(cache)


def make_layers(
    num_layers: int, heads: Heads, batch: int, context: int, query_len: int, dtype: torch.dtype, in_int8: bool
) -> list[list]:
    """The arguments of each layer's call: a batch of equal sequences whose blocks lie anywhere."""
    blocks = -(-context // BLOCK_SIZE) * batch
    numbers = torch.randn(blocks, BLOCK_SIZE, heads.kv, heads.dim).to(dtype)
    numbers = to_int8(numbers) if in_int8 else numbers
    caches = in_huge_pages(numbers.expand(num_layers, 2, *numbers.shape))
    query = torch.randn(batch * query_len, heads.query, heads.dim).to(dtype)
    lens = torch.full((batch,), context, dtype=torch.int32)
    starts = torch.arange(batch + 1, dtype=torch.int32) * query_len
    rest = (lens, starts, query_len, heads.dim**-0.5, -1, -1, 0.0)
    tables = (torch.randperm(blocks).view(batch, -1).int() for _ in range(num_layers))
    return [
        [torch.empty_like(query), query, *layer, table, *rest]
        for layer, table in zip(caches, tables, strict=True)
    ]


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
    name: str,
    heads: Heads,
    batch: int,
    context: int,
    query_len: int,
    dtype: torch.dtype,
    rounds: int,
    in_int8: bool = False,
) -> dict:
    """Times of one shape; bytes are what must be read of keys and values once."""
    head_bytes = heads.dim + SCALE_BYTES if in_int8 else heads.dim * dtype.itemsize
    size = 2 * batch * context * heads.kv * head_bytes
    num_layers = min(64, max(1, CACHED_BYTES // size)) if query_len == 1 else 1
    turns = itertools.cycle(make_layers(num_layers, heads, batch, context, query_len, dtype, in_int8))
    calls = {
        provider: select("paged_attention", device=torch.device("cpu"), dtype=dtype, provider=provider).call
        for provider in ("cpu", "reference")
    }
    contenders = {provider: lambda call=call: call(*next(turns)) for provider, call in calls.items()}
    if not in_int8:
        contenders["gather + SDPA"] = lambda: sdpa(next(turns), heads, batch, context, query_len)
    if size > 1 << 20:
        pieces = itertools.cycle(torch.ones(max(size, CACHED_BYTES) // 4).split(size // 4))
        contenders["read in order"] = lambda: next(pieces).sum()
    if size > CACHED_BYTES // 8:
        del contenders["reference"]  # takes seconds
    times = measure.race(contenders, rounds)
    kind = str(dtype).removeprefix("torch.") + (", int8 cache" if in_int8 else "")
    return {"name": f"{name} {kind}", "bytes": size, "microseconds": times}


def main() -> None:
    options = measure.arguments("paged_attention")
    cases = []
    for dtype in (torch.bfloat16, torch.float32):
        for heads, batch, context in DECODE:
            name = f"decode {batch} x {context}, {heads.query}/{heads.kv} x {heads.dim}"
            cases.append(run_case(name, heads, batch, context, 1, dtype, options.rounds))
            if dtype == torch.bfloat16 and context > 1000:
                cases.append(run_case(name, heads, batch, context, 1, dtype, options.rounds, in_int8=True))
        for length in PREFILL:
            rounds = max(3, options.rounds // 4)
            cases.append(run_case(f"prefill {length}", SMALL, 1, length, length, dtype, rounds))
    measure.report("paged_attention", options, cases)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
