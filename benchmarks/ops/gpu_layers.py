"""All layers of a decode step in a CUDA graph, without a compiled model: rotation alone, and in attention.

Quick to start, so that kernels can be compared within a minute; what each adds to the step with --profile.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu_linear import DEVICE, DTYPE, EPS, OPS, Model, make_model
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpu_steps import profiled, show, table
from workloads import SHAPES

from lamina.models.registry import AttentionSpec
from lamina.runtime.worker.attention import PagedAttention, allocate_caches, select_backend

BLOCK_SIZE = 64
RESULT = Path(__file__).resolve().parent.parent / "results" / "gpu_layers.json"


def main() -> None:
    """Print a line for each batch and way, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["8b", "1b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128, 256])
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--profile", nargs="*", type=int, default=[], help="batches to be shown by kernel")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for shape in options.shapes:
        model = make_model(shape)
        for batch in options.batches:
            steps = {way: Layers(model, shape, batch, options, way) for way in ("two kernels", "one kernel")}
            taken = race(steps, options.rounds)
            found[f"{shape} {batch}"] = taken
            print(shape, "batch", batch, {way: round(ms, 4) for way, ms in taken.items()}, flush=True)
            options.output.write_text(json.dumps(found, indent=1) + "\n")
            if batch in options.profile:
                for way, step in steps.items():
                    print(way)
                    show(table(profiled(step.graph.replay)))


class Layers:
    """The layers, the norm behind them and the LM head over requests of one length, captured."""

    def __init__(self, model: Model, shape: str, batch: int, options: argparse.Namespace, way: str) -> None:
        sizes = SHAPES[shape]
        self.heads, self.kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
        self.head_dim, self.model = sizes["head_dim"], model
        self.x = torch.randn(batch, sizes["hidden_size"], device=DEVICE, dtype=DTYPE)
        angles = torch.rand(batch, self.head_dim // 2, device=DEVICE)
        self.angles = angles.cos(), angles.sin()
        used = -(-options.context // BLOCK_SIZE)
        caches = allocate_caches(
            num_layers=len(model.layers),
            num_blocks=batch * used + 1,
            block_size=BLOCK_SIZE,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=DTYPE,
            device=DEVICE,
        )
        for cache in caches:
            for values in cache:
                values.normal_()
        backend = select_backend(
            "auto", device=DEVICE, dtype=DTYPE, head_dim=self.head_dim, block_size=BLOCK_SIZE
        )
        if way == "two kernels":
            backend = dataclasses.replace(backend, rotating_decode=None)
        specs = [AttentionSpec(scale=self.head_dim**-0.5)] * len(model.layers)
        self.attention = PagedAttention(backend, caches, specs)
        self.attention.begin(view(batch, options.context, options.max_model_len))
        self.graph = self._captured()

    def _captured(self) -> Any:
        stream: Any = torch.cuda.Stream()
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
