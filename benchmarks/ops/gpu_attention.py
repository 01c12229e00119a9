"""lamina::paged_attention on one GPU, in CUDA graphs, beside FlashAttention, SDPA and the naive way.

With --kv-cache-dtype fp8 keys and values lie in FP8, and bytes are counted so. "one split" and "fixed splits"
are the two ways of batch invariance.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lamina.custom_ops._shared.fp8 import FP8
from lamina.custom_ops._shared.registry import select
from lamina.custom_ops.paged_attention import _cuda, _fixed_splits

RESULT = Path(__file__).resolve().parent.parent / "results" / "gpu_attention.json"
DEVICE = torch.device("cuda")
ROTATED_BYTES = 256 << 20  # inputs that a graph goes through: several times the L2 cache
CAPACITY = 4096  # keys that the block table has room for at least

Contender = Callable[["Inputs"], Callable[[], Any]]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A batch of sequences; one length stands for equal ones, two for a range of random ones."""

    batch: int
    context: tuple[int, ...]
    query_len: int = 1
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 64

    @property
    def name(self) -> str:
        kind = "decode" if self.query_len == 1 else f"{self.query_len} new"
        context = "-".join(map(str, self.context))
        return f"{kind} {self.batch} x {context}, {self.num_heads}/{self.num_kv_heads} x {self.head_dim}"


DECODE = [
    *(
        Shape(batch=batch, context=(1024,), head_dim=dim)
        for dim in (128, 64)
        for batch in (1, 8, 32, 64, 128, 256)
    ),
    *(Shape(batch=1, context=(length,), head_dim=dim) for dim in (128, 64) for length in (4096, 32768)),
    Shape(batch=256, context=(128,)),
    Shape(batch=64, context=(100, 8000)),
    Shape(batch=8, context=(8192,)),
    Shape(batch=64, context=(1024,), head_dim=256, num_heads=16, num_kv_heads=4),
    Shape(batch=64, context=(1024,), head_dim=96, num_heads=32, num_kv_heads=32),
    Shape(batch=64, context=(1024,), head_dim=64, num_heads=9, num_kv_heads=3),
]
PREFILL = [
    *(Shape(batch=1, context=(length,), query_len=length, head_dim=128) for length in (512, 2048, 8192)),
    *(Shape(batch=1, context=(length,), query_len=length, head_dim=64) for length in (2048, 8192)),
    Shape(batch=8, context=(1024,), query_len=1024),
    Shape(batch=1, context=(16384,), query_len=512),
]


@dataclass(frozen=True)
class Inputs:
    """The op's arguments, and the lengths on the host."""

    shape: Shape
    lens: list[int]
    arguments: tuple[Any, ...]


def make_inputs(shape: Shape, dtype: torch.dtype, cached: torch.dtype | None = None) -> list[Inputs]:
    """Input sets that share one cache, each in blocks of its own that lie anywhere."""
    cached = cached or dtype
    low, high = shape.context[0], shape.context[-1]
    lens = torch.randint(low, high + 1, (shape.batch,)).tolist()
    per_seq = -(-high // shape.block_size)
    per_set = per_seq * shape.batch
    block_bytes = 2 * shape.block_size * shape.num_kv_heads * shape.head_dim * cached.itemsize
    num_sets = max(1, min(64, ROTATED_BYTES // (per_set * block_bytes)))
    cache_shape = (num_sets * per_set, shape.block_size, shape.num_kv_heads, shape.head_dim)
    caches = [torch.randn(cache_shape, device=DEVICE, dtype=dtype).to(cached) for _ in range(2)]
    order = torch.randperm(num_sets * per_set, device=DEVICE).int().view(num_sets, shape.batch, per_seq)
    width = max(per_seq, CAPACITY // shape.block_size)
    sets = []
    for blocks in order:
        tables = torch.zeros(shape.batch, width, dtype=torch.int32, device=DEVICE)
        tables[:, :per_seq] = blocks
        tokens = shape.batch * shape.query_len
        query = torch.randn(tokens, shape.num_heads, shape.head_dim, device=DEVICE, dtype=dtype)
        starts = torch.arange(0, tokens + 1, shape.query_len, dtype=torch.int32, device=DEVICE)
        seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        scale = shape.head_dim**-0.5
        limits = (shape.query_len, scale, -1, -1, 0.0)
        sets.append(
            Inputs(shape, lens, (torch.empty_like(query), query, *caches, tables, seq_lens, starts, *limits))
        )
    return sets


def ours(provider: str) -> Contender:
    """A provider of the op."""

    def prepare(inputs: Inputs) -> Callable[[], Any]:
        dtype = inputs.arguments[1].dtype
        call = select("paged_attention", device=DEVICE, dtype=dtype, provider=provider).call
        return lambda: call(*inputs.arguments)

    return prepare


def batch_invariant(*, by_fixed_splits: bool) -> Contender:
    """Our kernels whose rows have the same bits in any batch."""

    def prepare(inputs: Inputs) -> Callable[[], Any]:
        dtype = inputs.arguments[1].dtype
        call = select("paged_attention", device=DEVICE, dtype=dtype, provider="cuda").call

        def attend() -> None:
            _fixed_splits.ENABLED = by_fixed_splits
            call(*inputs.arguments, 1.0, 1.0, True)

        return attend

    return prepare


def sdpa(inputs: Inputs) -> Callable[[], Any]:
    """torch's attention over keys and values that lie dense already, which serving never has."""
    shape = inputs.shape
    if len(shape.context) > 1 or shape.query_len not in (1, shape.context[0]):
        raise ValueError("SDPA takes equal lengths and no chunks")
    _, query, key_cache, value_cache, tables, *_ = inputs.arguments
    blocks = tables[:, : -(-shape.context[0] // shape.block_size)].long()
    keys, values = (
        cache[blocks].flatten(1, 2)[:, : shape.context[0]].transpose(1, 2).contiguous()
        for cache in (key_cache, value_cache)
    )
    query = query.view(shape.batch, shape.query_len, shape.num_heads, shape.head_dim).transpose(1, 2)
    causal = shape.query_len > 1
    return lambda: F.scaled_dot_product_attention(query, keys, values, is_causal=causal, enable_gqa=True)


def naive(inputs: Inputs) -> Callable[[], Any]:
    """The same by a GEMM, a softmax and a GEMM."""
    attend = sdpa(inputs)

    def call() -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return attend()

    return call


CONTENDERS: dict[str, Contender] = {
    "cuda": ours("cuda"),
    "one split": batch_invariant(by_fixed_splits=False),
    "fixed splits": batch_invariant(by_fixed_splits=True),
    "triton": ours("triton"),
    "flash_attn": ours("flash_attn"),
    "SDPA, dense": sdpa,
    "naive, dense": naive,
}


def seconds(calls: list[Callable[[], Any]], repeats: int) -> float:
    """Median seconds of one call, in a graph that goes through all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times[3:])


def copy_bandwidth() -> float:
    """Bytes/s of a large copy, read and write counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE).random_(0, 255)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds([lambda: target.copy_(source)], 20)


def cost(inputs: Inputs, dtype: torch.dtype, cached: torch.dtype | None = None) -> tuple[int, float]:
    """Least bytes: keys, values, queries and outputs once; operations: two GEMMs of what is visible."""
    shape = inputs.shape
    cached = cached or dtype
    cache_bytes = 2 * sum(inputs.lens) * shape.num_kv_heads * cached.itemsize
    row_bytes = 2 * shape.batch * shape.query_len * shape.num_heads * dtype.itemsize
    past = [length - shape.query_len for length in inputs.lens]
    visible = sum(shape.query_len * before + shape.query_len * (shape.query_len + 1) / 2 for before in past)
    return (cache_bytes + row_bytes) * shape.head_dim, 4.0 * visible * shape.num_heads * shape.head_dim


def measure(
    shape: Shape, dtype: torch.dtype, cached: torch.dtype, contenders: list[str], repeats: int
) -> dict[str, Any]:
    """Figures of every contender for one shape, or why one has none."""
    sets = make_inputs(shape, dtype, cached)
    num_bytes, operations = cost(sets[0], dtype, cached)
    row: dict[str, Any] = {
        "shape": asdict(shape),
        "name": shape.name,
        "dtype": str(dtype),
        "kv_cache_dtype": str(cached),
        "bytes": num_bytes,
    }
    row |= {"operations": operations, "sets": len(sets), "seconds": {}, "refused": {}}
    for name in contenders:
        try:
            row["seconds"][name] = seconds([CONTENDERS[name](inputs) for inputs in sets], repeats)
        except Exception as error:  # a contender that is missing or refuses a shape is a fact to report
            row["refused"][name] = f"{type(error).__name__}: {error}"[:200]
            torch.cuda.synchronize()
    return row


def line(row: dict[str, Any], bandwidth: float) -> str:
    """One line of the table: microseconds, and the share of copy bandwidth or TFLOP/s."""
    cells = []
    for name, taken in row["seconds"].items():
        if row["shape"]["query_len"] == 1:
            figure = f"{row['bytes'] / taken / 1e9:5.0f} GB/s {row['bytes'] / taken / bandwidth:4.0%}"
        else:
            figure = f"{row['operations'] / taken / 1e12:4.0f} TFLOP/s"
        cells.append(f"{name} {taken * 1e6:8.1f} us {figure}")
    return f"{row['name']:38} " + "   ".join(cells)


def main() -> None:
    """Print a line a shape as it is known, then write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--only", default="", help="shapes whose name has this text")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp8"])
    parser.add_argument("--hopper-reads-fp8", action="store_true", help="prefill over FP8 by WGMMA and TMA")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    _cuda.HOPPER_READS_FP8 |= options.hopper_reads_fp8
    cached = FP8 if options.kv_cache_dtype == "fp8" else torch.bfloat16
    bandwidth = copy_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s; decode in shares of it",
        flush=True,
    )
    rows = []
    for shape in (*DECODE, *PREFILL):
        if options.only in shape.name:
            rows.append(measure(shape, torch.bfloat16, cached, options.contenders, options.repeats))
            print(line(rows[-1], bandwidth), flush=True)
    refusals = {f"{name}: {why}" for row in rows for name, why in row["refused"].items()}
    print("\n".join(sorted(refusals)[:12]))
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    document = {"machine": machine, "copy_bytes_per_s": bandwidth, "results": rows}
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
