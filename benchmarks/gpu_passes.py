"""What each pass and each provider buys: a LLaMA compiled with every pass off in turn and every op forced."""

import argparse
import concurrent.futures
import json
import multiprocessing
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import workloads
from gpu import describe_machine
from torch import Tensor

from lamina.common.store import Store
from lamina.compiler.compile import Program, compile_program
from lamina.compiler.config import CompileConfig
from lamina.compiler.execution.plan import Compiled
from lamina.compiler.passes.pipeline import PASS_NAMES
from lamina.custom_ops._shared import registry
from lamina.models import find_model
from lamina.models.checkpoints.weights import dummy_weights
from lamina.models.config import ModelConfig
from lamina.models.layers import FAST_OPS
from lamina.models.rope import rotation_tables
from lamina.runtime.worker.attention import PagedAttention, allocate_caches, select_backend

RESULT = Path(__file__).resolve().parent / "results" / "gpu_passes.json"
BLOCK_SIZE, CONTEXT = 16, 128
OF_THE_OPS = ("linear", "add_rms_norm_linear", "rotary_and_write_kv_cache", "qk_norm")
FORMULAS = tuple(name for name in PASS_NAMES if name not in OF_THE_OPS)
NAMED = tuple(name for name in PASS_NAMES if name not in ("lower", "add_rms_norm_linear"))
OPS = ("rms_norm", "add_rms_norm", "silu_and_mul", "linear", "rotary_embedding")
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The passes that run, and the providers that ops are forced to."""

    name: str
    passes: tuple[str, ...]
    providers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A step: `tokens` of one prompt, or one token of each of `tokens` sequences."""

    name: str
    tokens: int
    is_prefill: bool = False


def main() -> None:
    """Print a line a setting as it is known, then the table; write JSON after every setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1b", choices=[*workloads.SHAPES, "tiny"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--only", nargs="+", help="settings whose names hold one of these")
    parser.add_argument("--seconds", type=float, default=140, help="no setting is measured after these")
    parser.add_argument("--processes", type=int, default=12, help="that compile side by side")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    started = time.monotonic()
    points = [Point(name=f"batch {size}", tokens=size) for size in options.batches]
    points.append(Point(name=f"prefill {options.prefill}", tokens=options.prefill, is_prefill=True))
    model = Model(options.shape, torch.device(options.device), points)
    document: dict[str, Any] = {"machine": machine(model.device), "shape": options.shape, "settings": {}}
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            setting
            for setting in settings_of(model.device)
            if not options.only or any(part in setting.name for part in options.only)
        ]
        compile_at_once(settings, options, Path(folder))
        print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
        started = time.monotonic()
        for setting in settings:
            if time.monotonic() - started > options.seconds:
                print(f"left out for want of time: {setting.name}", flush=True)
                continue
            document["settings"][setting.name] = measure(
                setting, model, points, store_of(setting, Path(folder)), options.repeats
            )
            options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document["settings"], [point.name for point in points]))


def compile_at_once(settings: list[Setting], options: argparse.Namespace, folder: Path) -> None:
    """Fill the store with every setting, since the measuring process takes them one after another."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.processes, mp_context=spawn) as pool:
        compiling = partial(compile_alone, options.shape, options.device, folder)
        list(pool.map(compiling, settings))


def compile_alone(shape: str, device: str, folder: Path, setting: Setting) -> None:
    torch.set_num_threads(1)
    program = Model(shape, torch.device(device), [Point(name="none", tokens=1)]).program()
    compile_program(program, CompileConfig(passes=setting.passes), "fast", store_of(setting, folder))


def store_of(setting: Setting, folder: Path) -> Store:
    """Its own for every setting, since one store compiles one thing at a time."""
    return Store(folder / setting.name.replace(" ", "_"))


def machine(device: torch.device) -> dict[str, str]:
    return describe_machine() if device.type == "cuda" else {"gpu": "none", "torch": torch.__version__}


def settings_of(device: torch.device) -> list[Setting]:
    """All on, all off, each pass off, Inductor forced, and each op forced to each provider that runs here."""
    found = [
        Setting(name="all passes", passes=PASS_NAMES),
        Setting(name="no passes", passes=()),
        Setting(name="inductor for every op", passes=FORMULAS),
        Setting(name="ops apart, as they are chosen", passes=NAMED),
    ]
    for name in PASS_NAMES:
        rest = tuple(other for other in PASS_NAMES if other != name)
        found.append(Setting(name=f"without {name}", passes=rest))
    for op in (*OPS, "rotary_and_write_kv_cache", "add_rms_norm_linear"):
        passes = NAMED if op in OPS else PASS_NAMES
        if op == "rotary_embedding":
            passes = tuple(name for name in NAMED if name != "rotary_and_write_kv_cache")
        for provider in registry.providers(op):
            if provider != "reference" and registry.runs_on(op, provider, device.type):
                found.append(Setting(name=f"{op} by {provider}", passes=passes, providers={op: provider}))
    return found


class Model:
    """Random weights, caches, and the step of every point."""

    def __init__(self, shape: str, device: torch.device, points: list[Point]) -> None:
        sizes = TINY if shape == "tiny" else workloads.SHAPES[shape]
        values = {"max_position_embeddings": 4096, "rope_scaling": None}
        self.config = ModelConfig.from_dict({**workloads.COMMON, **sizes, **values}, origin=shape)
        self.definition = find_model(self.config.architecture)
        self.device, self.dtype = device, torch.bfloat16
        given = {"dtype": self.dtype, "device": device}
        self.weights = dummy_weights(self.definition, self.config, seed=0, **given).by_name
        self.weights |= rotation_tables(self.config, max_model_len=4096, **given)
        most = max(point.tokens * (1 if point.is_prefill else CONTEXT) for point in points)
        self.caches = allocate_caches(
            num_layers=self.config.num_layers,
            num_blocks=most // BLOCK_SIZE + 2,
            block_size=BLOCK_SIZE,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            **given,
        )
        for keys, values_ in self.caches:
            keys.normal_()
            values_.normal_()

    def program(self) -> Program:
        table = {name: (tuple(weight.shape), weight.dtype) for name, weight in self.weights.items()}
        forward = partial(_forward, self.definition, self.config)
        return Program(forward=forward, parameters=table, key={}, sources=(), device=self.device)

    def attention(self, point: Point) -> PagedAttention:
        """Attention of a point's step."""
        backend = select_backend(
            "auto",
            device=self.device,
            dtype=self.dtype,
            head_dim=self.config.head_dim,
            block_size=BLOCK_SIZE,
        )
        attention = PagedAttention(backend, self.caches, self.definition.attention(self.config))
        attention.begin(batch_of(point, self.device))
        return attention

    def tokens(self, point: Point) -> tuple[Tensor, Tensor]:
        ids = torch.arange(point.tokens, dtype=torch.int32, device=self.device) * 7 % self.config.vocab_size
        if point.is_prefill:
            return ids, torch.arange(point.tokens, dtype=torch.int32, device=self.device)
        return ids, torch.full_like(ids, CONTEXT - 1)


def _forward(
    definition: Any, config: ModelConfig, weights: Any, ids: Any, positions: Any, attend: Any
) -> Any:
    return definition.forward(config, weights, ids, positions, attend, FAST_OPS)


def batch_of(point: Point, device: torch.device) -> Any:
    """What attention reads of a step: block 0 is nobody's."""
    length = point.tokens if point.is_prefill else CONTEXT
    num_seqs = 1 if point.is_prefill else point.tokens
    blocks = -(-length // BLOCK_SIZE)
    tables = 1 + torch.arange(num_seqs * blocks, dtype=torch.int32, device=device).view(num_seqs, blocks)
    slots = (tables[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)).flatten(1)
    slots = slots[:, :length] if point.is_prefill else slots[:, length - 1 : length]
    starts = [0, point.tokens] if point.is_prefill else range(num_seqs + 1)
    return SimpleNamespace(
        slot_mappings=(slots.flatten().int(),),
        block_tables=(tables,),
        seq_lens=torch.full((num_seqs,), length, dtype=torch.int32, device=device),
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        max_query_len=point.tokens if point.is_prefill else 1,
    )


@torch.inference_mode()
def measure(
    setting: Setting, model: Model, points: list[Point], store: Store, repeats: int
) -> dict[str, Any]:
    """Milliseconds of a step at every point, the kernels that were generated and the ops that are called."""
    started = time.perf_counter()
    compiled = compile_program(model.program(), CompileConfig(passes=setting.passes), "fast", store)
    row = {"passes": setting.passes, "providers": dict(setting.providers), **describe(compiled, store)}
    row["compile_s"] = time.perf_counter() - started
    bound = compiled.plan.bind(model.weights, model.device)
    row["ms"] = {}
    with registry.forced(setting.providers):
        for point in points:
            step = partial(bound, *model.tokens(point), model.attention(point))
            row["ms"][point.name] = milliseconds(step, model.device, repeats)
    figures = {name: round(ms, 4) for name, ms in row["ms"].items()}
    print(f"{setting.name:40} {len(row['kernels']):3} kernels  {figures}", flush=True)
    return row


def describe(compiled: Compiled, store: Store) -> dict[str, Any]:
    """Generated kernels, calls of ops and sites by pass, of all unique pieces together."""
    artifacts = [piece.artifact for piece in compiled.plan.pieces]
    sites: dict[str, int] = {}
    for report in [*compiled.plan.reports, *(report for one in artifacts for report in one.reports)]:
        sites[report["name"]] = sites.get(report["name"], 0) + report["num_matches"]
    sources = [store.get(one.source).decode() for one in artifacts]
    return {
        "kernels": [name for one in artifacts for name in (*one.kernels, *one.launches)],
        "ops": [op for text in sources for op in re.findall(r"= torch\.ops\.lamina\.(\w+)\.default\(", text)],
        "sites": sites,
    }


def milliseconds(step: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The median of a step's time: on a GPU of its CUDA graph's, on a CPU by the clock."""
    step()
    if device.type != "cuda":
        return statistics.median(_clocked(step) for _ in range(repeats)) * 1e3
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _clocked(step: Callable[[], Any]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def table(settings: Mapping[str, Any], points: list[str]) -> str:
    """Markdown: milliseconds, and how much less than with no passes."""
    lines = [f"| ms | {' | '.join(points)} |", f"|---|{'---|' * len(points)}"]
    base = settings.get("no passes", {"ms": {}})["ms"]
    for name, row in settings.items():
        cells = []
        for point in points:
            gain = f" ({1 - row['ms'][point] / base[point]:+.1%})" if point in base else ""
            cells.append(f"{row['ms'][point]:.3f}{gain}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
