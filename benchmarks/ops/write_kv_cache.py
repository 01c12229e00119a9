"""lamina::write_kv_cache beside its formula and beside index_copy_ on a cache seen as rows."""

import measure
import torch

from lamina.custom_ops._shared.registry import select

NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 3, 64, 32, 1024


def run_case(num_tokens: int, dtype: torch.dtype, rounds: int) -> dict:
    """Times of one step's tokens; bytes are read and written once each."""
    shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    key_cache, value_cache = (torch.zeros(shape, dtype=dtype) for _ in range(2))
    qkv = torch.randn(num_tokens, 9 + 2 * NUM_KV_HEADS, HEAD_DIM).to(dtype)
    key, value = qkv[:, 9:12].contiguous(), qkv[:, 12:]
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:num_tokens].int()
    arguments = (key, value, key_cache, value_cache, slots)

    def by_index_copy() -> None:
        index = slots.long()
        key_cache.flatten(0, 1).index_copy_(0, index, key)
        value_cache.flatten(0, 1).index_copy_(0, index, value)

    contenders = {"index_copy_ (no padding)": by_index_copy}
    for provider in ("cpu", "reference"):
        call = select("write_kv_cache", device=torch.device("cpu"), dtype=dtype, provider=provider).call
        contenders[provider] = lambda call=call: call(*arguments)
    times = measure.race(contenders, rounds)
    size = 4 * key.numel() * key.element_size()
    name = f"{num_tokens} tokens {str(dtype).removeprefix('torch.')}"
    return {"name": name, "bytes": size, "microseconds": times}


def main() -> None:
    options = measure.arguments("write_kv_cache")
    cases = [run_case(count, torch.bfloat16, options.rounds * 5) for count in (1, 8, 32, 512, 4096)]
    measure.report("write_kv_cache", options, cases)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
