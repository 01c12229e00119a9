"""lamina::rotary_and_write_kv_cache beside its formula and beside the two ops it stands for."""

import measure
import torch

from lamina.custom_ops import rotary_embedding, write_kv_cache
from lamina.custom_ops._shared.registry import select

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 9, 3, 64, 32, 1024


def run_case(num_tokens: int, dtype: torch.dtype, rounds: int) -> dict:
    """Times of one step's tokens; bytes are read and written once each."""
    shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    key_cache, value_cache = (torch.zeros(shape, dtype=dtype) for _ in range(2))
    qkv = torch.randn(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM).to(dtype)
    query, key, value = qkv.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
    angles = torch.rand(num_tokens, HEAD_DIM // 2) * 100
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:num_tokens].int()
    arguments = (query, key, value, angles.cos(), angles.sin(), key_cache, value_cache, slots)

    def apart() -> None:
        _, rotated = rotary_embedding(*arguments[:2], *arguments[3:5])
        write_kv_cache(rotated, value, key_cache, value_cache, slots)

    contenders = {"rotary_embedding, write_kv_cache": apart}
    for provider in ("cpu", "reference"):
        op = "rotary_and_write_kv_cache"
        call = select(op, device=torch.device("cpu"), dtype=dtype, provider=provider).call
        contenders[provider] = lambda call=call: call(*arguments)
    times = measure.race(contenders, rounds)
    name = f"{num_tokens} tokens {str(dtype).removeprefix('torch.')}"
    return {"name": name, "bytes": 2 * qkv.numel() * qkv.element_size(), "microseconds": times}


def main() -> None:
    options = measure.arguments("rotary_and_write_kv_cache")
    cases = [run_case(count, torch.bfloat16, options.rounds * 5) for count in (1, 8, 32, 512, 4096)]
    measure.report("rotary_and_write_kv_cache", options, cases)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
