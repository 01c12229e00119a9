"""All GEMMs of a decode step on one GPU, in one CUDA graph: the library's and ours."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_attention import copy_bandwidth, seconds
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from workloads import SHAPES

import lamina.custom_ops  # noqa: F401  registers the ops

RESULT = Path(__file__).resolve().parent.parent / "results" / "gpu_linear.json"
DEVICE, DTYPE, EPS = torch.device("cuda"), torch.bfloat16, 1e-5
OPS = torch.ops.lamina
MAX_FLOPS = 0.78e15  # a large GEMM, as benchmarks/gpu.py measures it


@dataclass(frozen=True)
class Layer:
    """The weights of one layer, [out, in] each."""

    qkv: Tensor
    attended: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Model:
    """The matrices of a step, and a norm's weight for all norms."""

    layers: tuple[Layer, ...]
    head: Tensor
    norm: Tensor

    @property
    def matrices(self) -> list[Tensor]:
        inner = [vars(layer).values() for layer in self.layers]
        return [*(matrix for layer in inner for matrix in layer), self.head]

    def floor(self, batch: int) -> tuple[float, float]:
        """Bytes of all matrices, and operations."""
        elements = sum(matrix.numel() for matrix in self.matrices)
        return elements * DTYPE.itemsize, 2.0 * elements * batch


def make_model(shape: str) -> Model:
    """Random weights of a shape."""
    sizes = SHAPES[shape]
    hidden, inner, head_dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    heads = sizes["num_attention_heads"] + 2 * sizes["num_key_value_heads"]

    def weight(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=DEVICE, dtype=DTYPE) / columns**0.5

    layers = tuple(
        Layer(
            qkv=weight(heads * head_dim, hidden),
            attended=weight(hidden, hidden),
            gate_up=weight(2 * inner, hidden),
            down=weight(hidden, inner),
        )
        for _ in range(sizes["num_hidden_layers"])
    )
    norm = torch.ones(hidden, device=DEVICE, dtype=DTYPE)
    return Model(layers=layers, head=weight(sizes["vocab_size"], hidden), norm=norm)


Linear = Callable[[Tensor, Tensor], Tensor]


def gemms(model: Model, x: Tensor, linear: Linear) -> Tensor:
    """The matrices alone, each with rows of its own width."""
    for layer in model.layers:
        attended = linear(x, layer.qkv)[:, : x.shape[1]]
        x = linear(attended, layer.attended)
        x = linear(linear(x, layer.gate_up)[:, : layer.down.shape[1]], layer.down)
    return linear(x, model.head)


def with_glue(model: Model, x: Tensor, linear: Linear) -> Tensor:
    """The matrices, norms and gates; no attention."""
    residual = x
    for layer in model.layers:
        normed, residual = OPS.add_rms_norm.default(x, residual, model.norm, EPS)
        x = linear(linear(normed, layer.qkv)[:, : x.shape[1]], layer.attended)
        normed, residual = OPS.add_rms_norm.default(x, residual, model.norm, EPS)
        x = linear(OPS.silu_and_mul.default(linear(normed, layer.gate_up)), layer.down)
    return linear(x, model.head)


def fused(model: Model, x: Tensor) -> Tensor:
    """The same by the op that takes norm, GEMM and gate at once."""
    residual, linear, whole = x, OPS.linear.default, OPS.add_rms_norm_linear.default
    for layer in model.layers:
        qkv, residual = whole(x, residual, model.norm, EPS, layer.qkv, None, False)
        x = linear(qkv[:, : x.shape[1]], layer.attended)
        gated, residual = whole(x, residual, model.norm, EPS, layer.gate_up, None, True)
        x = linear(gated, layer.down)
    return linear(x, model.head)


CONTENDERS: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "GEMMs, library": lambda model, x: gemms(model, x, F.linear),
    "GEMMs, ours": lambda model, x: gemms(model, x, OPS.linear.default),
    "with norms and gates, library": lambda model, x: with_glue(model, x, F.linear),
    "with norms and gates, ours": lambda model, x: with_glue(model, x, OPS.linear.default),
    "with norms and gates, fused": fused,
}


def measure(model: Model, batch: int, bandwidth: float, repeats: int) -> dict[str, Any]:
    """Seconds of every contender for one step, and the least there could be."""
    x = torch.randn(batch, model.norm.shape[0], device=DEVICE, dtype=DTYPE)
    taken = {name: seconds([lambda call=call: call(model, x)], repeats) for name, call in CONTENDERS.items()}
    num_bytes, operations = model.floor(batch)
    floor = {"bytes": num_bytes / bandwidth, "operations": operations / MAX_FLOPS}
    return {"batch": batch, "seconds": taken, "floor_seconds": floor}


def main() -> None:
    """Print a line a size as it is known, then write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, copy {bandwidth / 1e12:.2f} TB/s; ms a step", flush=True)
    results: dict[str, list[dict[str, Any]]] = {}
    for shape in options.shapes:
        model = make_model(shape)
        for batch in options.batches:
            row = measure(model, batch, bandwidth, options.repeats)
            results.setdefault(shape, []).append(row)
            cells = [f"{name} {taken * 1e3:.3f}" for name, taken in row["seconds"].items()]
            floor = "/".join(f"{least * 1e3:.3f}" for least in row["floor_seconds"].values())
            print(f"{shape} batch {batch:3}, floor {floor}: {'; '.join(cells)}", flush=True)
        del model
        torch.cuda.empty_cache()
    machine = {"gpu": gpu, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    document = {"machine": machine, "copy_bytes_per_s": bandwidth, "results": results}
    options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
