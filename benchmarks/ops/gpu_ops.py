"""Every op but attention on one GPU, in CUDA graphs: each provider beside torch's formula and a copy."""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_attention import copy_bandwidth, seconds
from torch import Tensor

from lamina.custom_ops._shared.registry import select

RESULT = Path(__file__).resolve().parent.parent / "results" / "gpu_ops.json"
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
ROTATED_BYTES = 256 << 20  # that a graph goes through: several times the L2 cache
MAX_SETS = 512  # so the smallest sizes stay in the cache, as they do between the kernels of a decode step
BLOCK_SIZE = 16
NOT_CAPTURED = {"write_kv_cache", "rotary_and_write_kv_cache"}  # their formulas look at the slots on the host


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes that the ops see."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


MODELS = {
    "8B": Model(hidden=4096, intermediate=14336, num_heads=32, num_kv_heads=8, head_dim=128),
    "1B": Model(hidden=2048, intermediate=8192, num_heads=32, num_kv_heads=8, head_dim=64),
}
Make = Callable[[Model, int], tuple[Any, ...]]


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def heads(model: Model, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value as views of one tensor, as a fused projection leaves them."""
    counts = [model.num_heads, model.num_kv_heads, model.num_kv_heads]
    query, key, value = rows(tokens, sum(counts), model.head_dim).split(counts, dim=1)
    return query, key, value


def angles(model: Model, tokens: int) -> tuple[Tensor, Tensor]:
    values = torch.rand(tokens, model.head_dim // 2, device=DEVICE) * 100
    return values.cos(), values.sin()


def caches(model: Model, tokens: int) -> tuple[Tensor, Tensor]:
    shape = (-(-tokens // BLOCK_SIZE) + 1, BLOCK_SIZE, model.num_kv_heads, model.head_dim)
    return rows(*shape), rows(*shape)


def slots(tokens: int) -> Tensor:
    return torch.randperm(tokens, device=DEVICE).int()


def copied_blocks(model: Model, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """As many blocks as hold the tokens, copied to as many others."""
    count = -(-tokens // BLOCK_SIZE)
    mapping = torch.randperm(2 * count, device=DEVICE).int().view(count, 2)
    return *caches(model, 2 * count * BLOCK_SIZE), mapping


OPS: dict[str, Make] = {
    "rms_norm": lambda m, t: (rows(t, m.hidden), rows(m.hidden), 1e-5),
    "add_rms_norm": lambda m, t: (rows(t, m.hidden), rows(t, m.hidden), rows(m.hidden), 1e-5),
    "silu_and_mul": lambda m, t: (rows(t, 2 * m.intermediate),),
    "rotary_embedding": lambda m, t: (*heads(m, t)[:2], *angles(m, t)),
    "write_kv_cache": lambda m, t: (*heads(m, t)[1:], *caches(m, t), slots(t)),
    "rotary_and_write_kv_cache": lambda m, t: (*heads(m, t), *angles(m, t), *caches(m, t), slots(t)),
    "copy_blocks": copied_blocks,
}


def moved_bytes(op: str, model: Model, tokens: int) -> int:
    """The least an op must move: every input and output once."""
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    table = 2 * model.head_dim  # of float32 cosines and sines a token, in elements of 2 bytes
    elements = {
        "rms_norm": 2 * model.hidden,
        "add_rms_norm": 4 * model.hidden,
        "silu_and_mul": 3 * model.intermediate,
        "rotary_embedding": 2 * (query + key) + table,
        "write_kv_cache": 4 * key,
        "rotary_and_write_kv_cache": 2 * (query + 2 * key) + table,
        "copy_blocks": 4 * key,
    }
    return elements[op] * tokens * DTYPE.itemsize


def time_sets(call: Callable[..., Any], sets: list[tuple[Any, ...]], repeats: int) -> float:
    """Seconds a call, over all input sets; each call's outputs stay, so that each has memory of its own."""
    kept: list[Any] = []
    return seconds([lambda arguments=arguments: kept.append(call(*arguments)) for arguments in sets], repeats)


def copies(num_bytes: int, num_sets: int) -> list[tuple[Tensor, Tensor]]:
    """Pairs of tensors whose copy moves as many bytes as the op."""
    size = max(1, num_bytes // 2)
    pairs = torch.empty(num_sets, 2, size, dtype=torch.uint8, device=DEVICE).random_(0, 255)
    return [(target, source) for target, source in pairs]


def measure(op: str, model: Model, tokens: int, providers: list[str], repeats: int) -> dict[str, Any]:
    """Seconds of every contender."""
    num_bytes = moved_bytes(op, model, tokens)
    num_sets = max(2, min(MAX_SETS, -(-ROTATED_BYTES // num_bytes)))
    sets = [OPS[op](model, tokens) for _ in range(num_sets)]
    row: dict[str, Any] = {"op": op, "tokens": tokens, "bytes": num_bytes, "sets": num_sets}
    row["seconds"] = {}
    for name in providers:
        if name != "reference" or op not in NOT_CAPTURED:
            call = select(op, device=DEVICE, dtype=DTYPE, provider=name).call
            row["seconds"][name] = time_sets(call, sets, repeats)
    row["seconds"]["copy"] = time_sets(Tensor.copy_, copies(num_bytes, num_sets), repeats)
    return row


def line(row: dict[str, Any], bandwidth: float) -> str:
    """One line of the table: microseconds, and the share of a large copy's bandwidth."""
    cells = [
        f"{name} {taken * 1e6:7.2f} us {row['bytes'] / taken / bandwidth:4.0%}"
        for name, taken in row["seconds"].items()
    ]
    return f"{row['op']:26}{row['tokens']:5}   " + "   ".join(cells)


def main() -> None:
    """Print a line a size as it is known, then write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="8B", choices=list(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 256, 4096])
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=list(OPS))
    parser.add_argument("--providers", nargs="+", default=["cuda", "triton", "reference"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s, {options.model}", flush=True)
    results = []
    for op in options.ops:
        for tokens in options.tokens:
            results.append(measure(op, MODELS[options.model], tokens, options.providers, options.repeats))
            print(line(results[-1], bandwidth), flush=True)
            torch.cuda.empty_cache()
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    document = {"machine": machine, "model": options.model, "copy_bytes_per_s": bandwidth, "results": results}
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
