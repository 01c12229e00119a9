"""All layers of a decode step in a CUDA graph, without a compiled model: rotation alone or in attention.

Quick to start, so that kernels can be compared within a minute; what each adds to the step with --profile.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from gpu_linear import DEVICE, DTYPE, EPS, OPS, Model, make_model
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpu_steps import profiled, show, table
from workloads import SHAPES

from lamina.custom_ops._shared.build_cuda import load_cuda_kernel
from lamina.custom_ops.linear import choices
from lamina.custom_ops.paged_attention import _plan
from lamina.models.registry import AttentionSpec
from lamina.runtime.worker.attention import PagedAttention, allocate_caches, select_backend

BLOCK_SIZE = 64
KERNELS = [("paged_attention", "cuda"), ("paged_attention", "rotary")] + [
    (op, "cuda")
    for op in ("linear", "linear_silu_and_mul", "add_rms_norm", "rotary_and_write_kv_cache", "silu_and_mul")
]


class Way(NamedTuple):
    """How the layers are run: by which kernels, and what is otherwise than as shipped."""

    rotates: bool = True  # attention by itself
    least_keys: int = 0  # of a split of decode attention; 0: as it is
    stages: int = 0  # of the GEMM behind attention; 0: as many as are shipped


WAYS = {
    "two kernels": Way(rotates=False),
    "one kernel": Way(),
    "splits of 256": Way(least_keys=256),
    "6 stages behind": Way(stages=6),
    "both": Way(least_keys=256, stages=6),
}
RESULT = Path(__file__).resolve().parent.parent / "results" / "gpu_layers.json"


def main() -> None:
    """Print a line for each batch and way, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["8b", "1b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128, 256])
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--profile", nargs="*", type=int, default=[], help="batches to be shown by kernel")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda kernel: load_cuda_kernel(*kernel), KERNELS))
    found: dict[str, Any] = {}
    for shape in options.shapes:
        model = make_model(shape)
        for batch in options.batches:
            steps = {}
            for name in options.ways:
                with otherwise(WAYS[name], shape, batch):
                    steps[name] = Layers(model, shape, batch, options, WAYS[name])
            taken = race(steps, options.rounds)
            found[f"{shape} {batch}"] = taken
            print(shape, "batch", batch, {way: round(ms, 4) for way, ms in taken.items()}, flush=True)
            options.output.write_text(json.dumps(found, indent=1) + "\n")
            if batch in options.profile:
                for way, step in steps.items():
                    print(way)
                    show(table(profiled(step.graph.replay)))


@contextlib.contextmanager
def otherwise(way: Way, shape: str, batch: int) -> Iterator[None]:
    """While it lasts, what is captured is as the way says."""
    hidden, name = SHAPES[shape]["hidden_size"], choices.device_name_of(DEVICE, DTYPE)
    bucket, keys = choices.bucket_of(batch), _plan.MIN_SPLIT_KEYS
    site = choices.Site(kind="linear", num_tokens=bucket or batch, n=hidden, k=hidden)
    config = choices.choose(site, name).kernel
    if way.stages and isinstance(config, choices.GemmConfig) and not config.clusters:
        changed = config._replace(stages=min(way.stages, config.stages))
        choices.adopt(name, [choices.Entry(site=site, kernel=changed, microseconds=0.0, otherwise=1.0)])
    if way.least_keys:
        _plan.MIN_SPLIT_KEYS = (way.least_keys, way.least_keys, *keys[2:])
    _plan.plan.cache_clear()
    try:
        yield
    finally:
        _plan.MIN_SPLIT_KEYS = keys
        _plan.plan.cache_clear()
        choices.adopt(name, [choices.Entry(site=site, kernel=config, microseconds=0.0, otherwise=1.0)])


class Layers:
    """The layers, the norm behind them and the LM head over requests of one length, captured."""

    def __init__(self, model: Model, shape: str, batch: int, options: argparse.Namespace, way: Way) -> None:
        sizes = SHAPES[shape]
        self.heads, self.kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
        self.head_dim, self.model = sizes["head_dim"], model
        self.x = torch.randn(batch, sizes["hidden_size"], device=DEVICE, dtype=DTYPE)
        angles = torch.rand(batch, self.head_dim // 2, device=DEVICE)
        self.angles = angles.cos(), angles.sin()
        lengths = options.context, options.max_model_len
        self.attention = attention_of(sizes, len(model.layers), batch, *lengths, rotates=way.rotates)
        self.graph = self._captured()

    def _captured(self) -> Any:
        stream: Any = torch.cuda.Stream()
        torch.cuda.synchronize()  # block tables and caches are written on another stream
        with torch.cuda.stream(stream):
            self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.run()
        return graph

    def run(self) -> Tensor:
        x, residual, norm = self.x, self.x, self.model.norm
        whole, linear = OPS.add_rms_norm_linear.default, OPS.linear.default
        for number, layer in enumerate(self.model.layers):
            qkv, residual = whole(x, residual, norm, EPS, layer.qkv, None, False)
            split = qkv.view(len(x), -1, self.head_dim).split([self.heads, self.kv_heads, self.kv_heads], 1)
            out = torch.empty_like(split[0], memory_format=torch.contiguous_format)
            self.attention(number, *split, out, *self.angles)
            x = linear(out.view(len(x), -1), layer.attended)
            gated, residual = whole(x, residual, norm, EPS, layer.gate_up, None, True)
            x = linear(gated, layer.down)
        normed, _ = OPS.add_rms_norm.default(x, residual, norm, EPS)
        result: Tensor = linear(normed, self.model.head)
        return result

    def milliseconds(self, replays: int = 15) -> float:
        """A step of some that follow each other."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / replays


def attention_of(
    sizes: dict[str, Any],
    num_layers: int,
    batch: int,
    context: int,
    max_model_len: int,
    *,
    rotates: bool = True,
) -> PagedAttention:
    """Attention of requests of one length over caches of random values."""
    caches = allocate_caches(
        num_layers=num_layers,
        num_blocks=batch * -(-context // BLOCK_SIZE) + 1,
        block_size=BLOCK_SIZE,
        num_kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        dtype=DTYPE,
        device=DEVICE,
    )
    for values in itertools.chain.from_iterable(caches):
        values.normal_()
    backend = select_backend(
        "auto", device=DEVICE, dtype=DTYPE, head_dim=sizes["head_dim"], block_size=BLOCK_SIZE
    )
    if not rotates:
        backend = dataclasses.replace(backend, rotating_decode=None)
    attention = PagedAttention(backend, caches, [AttentionSpec(scale=sizes["head_dim"] ** -0.5)] * num_layers)
    attention.begin(view(batch, context, max_model_len))
    return attention


def view(batch: int, context: int, max_model_len: int) -> Any:
    """What attention reads of an input batch: requests of one length, with blocks of their own."""
    used = -(-context // BLOCK_SIZE)
    blocks = 1 + torch.arange(batch * used, dtype=torch.int32, device=DEVICE).view(batch, used)
    tables = torch.zeros(batch, -(-max_model_len // BLOCK_SIZE), dtype=torch.int32, device=DEVICE)
    tables[:, :used] = blocks
    return SimpleNamespace(
        slot_mappings=(blocks[:, -1] * BLOCK_SIZE + (context - 1) % BLOCK_SIZE,),
        block_tables=(tables,),
        seq_lens=torch.full((batch,), context, dtype=torch.int32, device=DEVICE),
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device=DEVICE),
        max_query_len=1,
    )


def race(steps: dict[str, Layers], rounds: int) -> dict[str, float]:
    """Milliseconds of each, medians of rounds in which they take turns."""
    taken: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(rounds + 1):
        for way, step in steps.items():
            taken[way].append(step.milliseconds())
    return {way: statistics.median(times[1:]) for way, times in taken.items()}


if __name__ == "__main__":
    with torch.inference_mode():
        main()
