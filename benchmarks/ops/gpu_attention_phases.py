"""From how many queries a sequence FlashAttention beats our kernels, on the device and on the host."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from gpu_attention import DEVICE, RESULT, Shape, cost, make_inputs, ours, seconds

from lamina.custom_ops.paged_attention import _flash_attn
from lamina.custom_ops.paged_attention.phases import LONGEST_DECODE

QUERY_LENS = (1, 8, 16, 32, 64, 128, 512, 2048)
BATCHES = ((1, 2048), (8, 2048), (1, 16384))  # sequences, keys each
HEADS = (("8B", 32, 8, 128), ("1B", 32, 8, 64), ("135M", 9, 3, 64))
BLOCK_SIZES = {16: 1, 64: 512}  # from which query length on
MOST_TOKENS = 16384
PROVIDERS = ("cuda", "flash_attn")


def shapes() -> list[tuple[str, Shape]]:
    """Every batch of every model, as far as a step may have so many tokens."""
    return [
        (
            model,
            Shape(
                batch=batch,
                context=(context,),
                query_len=query_len,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                block_size=block_size,
            ),
        )
        for block_size, shortest in BLOCK_SIZES.items()
        for model, heads, kv_heads, head_dim in HEADS
        for batch, context in BATCHES
        for query_len in QUERY_LENS
        if shortest <= query_len <= context and batch * query_len <= MOST_TOKENS
    ]


def host_seconds(call: Any, repeats: int = 200) -> float:
    """What one call takes of the host, when the device is never waited for."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    taken = (time.perf_counter() - start) / repeats
    torch.cuda.synchronize()
    return taken


def start_seconds() -> dict[str, float]:
    """Importing FlashAttention, and its first call; a second process finds the kernel compiled."""
    start = time.perf_counter()
    choice = _flash_attn.choose(torch.device("cuda", torch.cuda.current_device()), 128, 16)
    imported = time.perf_counter()
    if choice.version is None:
        raise SystemExit(choice.reason)
    inputs = make_inputs(Shape(batch=1, context=(128,), query_len=128), torch.bfloat16)[0]
    torch.cuda.synchronize()
    before = time.perf_counter()
    ours("flash_attn")(inputs)()
    torch.cuda.synchronize()
    return {"import": imported - start, "first call": time.perf_counter() - before}


def measure(model: str, shape: Shape, repeats: int) -> dict[str, Any]:
    """Seconds on the device for one shape."""
    sets = make_inputs(shape, torch.bfloat16)
    _, operations = cost(sets[0], torch.bfloat16)
    taken = {name: seconds([ours(name)(inputs) for inputs in sets], repeats) for name in PROVIDERS}
    return {
        "model": model,
        "batch": shape.batch,
        "context": shape.context[0],
        "query_len": shape.query_len,
        "block_size": shape.block_size,
        "operations": operations,
        "seconds": taken,
    }


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    taken = row["seconds"]
    rates = " ".join(
        f"{name} {s * 1e6:9.1f} us {row['operations'] / s / 1e12:4.0f} TFLOP/s" for name, s in taken.items()
    )
    name = f"{row['model']:4} {row['batch']:3} x {row['context']:5}, {row['query_len']:4} new"
    return (
        f"{name}, blocks of {row['block_size']:3}: {rates}  ratio {taken['flash_attn'] / taken['cuda']:.2f}"
    )


def main() -> None:
    """Print a line a shape as it is known, then write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="", help="the model: 8B, 1B or 135M")
    parser.add_argument("--output", type=Path, default=RESULT.with_name("gpu_attention_phases.json"))
    options = parser.parse_args()
    started = start_seconds()
    print("start of flash_attn:", ", ".join(f"{name} {taken:.2f} s" for name, taken in started.items()))
    inputs = make_inputs(Shape(batch=1, context=(128,), query_len=128), torch.bfloat16)[0]
    host = {name: host_seconds(ours(name)(inputs)) for name in PROVIDERS}
    print("host, one call:", ", ".join(f"{name} {taken * 1e6:.0f} us" for name, taken in host.items()))
    print(f"the rule now: flash_attn above {LONGEST_DECODE} queries")
    rows = []
    for model, shape in shapes():
        if options.only in model:
            rows.append(measure(model, shape, options.repeats))
            print(line(rows[-1]), flush=True)
    document = {
        "gpu": torch.cuda.get_device_name(DEVICE),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "start_seconds": started,
        "host_seconds": host,
        "results": rows,
    }
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
