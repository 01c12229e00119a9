"""lamina::paged_attention beside its formula and beside torch's SDPA on gathered keys and values."""

import measure
import torch
import torch.nn.functional as F

from lamina.custom_ops.registry import select

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 32
DECODE = [(batch, context) for context in (100, 1024) for batch in (1, 8, 32)]
PREFILL = [512, 2048]


def make_arguments(batch: int, context: int, query_len: int, dtype: torch.dtype) -> list:
    """A batch of equal sequences whose blocks lie anywhere."""
    blocks = -(-context // BLOCK_SIZE)
    tables = torch.randperm(batch * blocks).view(batch, blocks).int()
    caches = [torch.randn(batch * blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM).to(dtype) for _ in range(2)]
    query = torch.randn(batch * query_len, NUM_HEADS, HEAD_DIM).to(dtype)
    lens = torch.full((batch,), context, dtype=torch.int32)
    starts = torch.arange(batch + 1, dtype=torch.int32) * query_len
    return [torch.empty_like(query), query, *caches, tables, lens, starts, query_len, HEAD_DIM**-0.5, -1, 0.0]


def sdpa(arguments: list, batch: int, context: int, query_len: int) -> torch.Tensor:
    """What torch alone offers: gather the blocks, then scaled_dot_product_attention."""
    _, query, key_cache, value_cache, tables, *_ = arguments
    keys, values = (
        cache[tables.long()].flatten(1, 2)[:, :context].transpose(1, 2) for cache in (key_cache, value_cache)
    )
    query = query.view(batch, query_len, NUM_HEADS, HEAD_DIM).transpose(1, 2)
    causal = query_len > 1
    return F.scaled_dot_product_attention(query, keys, values, is_causal=causal, enable_gqa=True)


def run_case(name: str, batch: int, context: int, query_len: int, dtype: torch.dtype, rounds: int) -> dict:
    """Times of one shape; bytes are what must be read of keys and values once."""
    args = make_arguments(batch, context, query_len, dtype)
    calls = {
        provider: select("paged_attention", device=torch.device("cpu"), dtype=dtype, provider=provider).call
        for provider in ("cpu", "reference")
    }
    contenders = {provider: lambda call=call: call(*args) for provider, call in calls.items()}
    contenders["gather + SDPA"] = lambda: sdpa(args, batch, context, query_len)
    size = 2 * batch * context * NUM_KV_HEADS * HEAD_DIM * args[1].element_size()
    times = measure.race(contenders, rounds)
    return {"name": f"{name} {str(dtype).removeprefix('torch.')}", "bytes": size, "microseconds": times}


def main() -> None:
    options = measure.arguments("paged_attention")
    cases = []
    for dtype in (torch.bfloat16, torch.float32):
        for batch, context in DECODE:
            name = f"decode {batch} x {context}"
            cases.append(run_case(name, batch, context, 1, dtype, options.rounds))
        for length in PREFILL:
            cases.append(run_case(f"prefill {length}", 1, length, length, dtype, max(3, options.rounds // 4)))
    measure.report("paged_attention", options, cases)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
