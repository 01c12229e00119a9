"""The whole runtime on one GPU: decode, first token, mixed traffic and start-up, beside the floor."""

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import workloads

from lamina import CompileConfig, Runtime, SamplingParams

RESULTS = Path(__file__).resolve().parent / "results"
BATCHES = (1, 8, 32, 128, 256)
PREFILLS = (512, 2048, 8192)
PROMPT, DECODED = 128, 128


def main() -> None:
    """Measure the shapes asked for, print a line each as it is known, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=["1b", "8b"])
    parser.add_argument("--cache-dir", default=None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-mixed", action="store_true")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--quantization", help="how projections are kept; the LM head is not")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp8"])
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, help="GPUs; the floor is theirs without sums"
    )
    parser.add_argument("--pipeline-parallel", type=int, default=1, help="stages, of so many GPUs each")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--prefills", type=int, nargs="*", default=PREFILLS)
    parser.add_argument("--cuda-graphs", default="auto", choices=["auto", "off"])
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu.json")
    options = parser.parse_args()
    ceilings = measure_ceilings()
    print("ceilings", ceilings, flush=True)
    document: dict[str, Any] = {"machine": describe_machine(), "ceilings": ceilings, "shapes": {}}
    for shape in options.shapes:
        document["shapes"][shape] = measure_shape(shape, options, ceilings)
        options.output.write_text(json.dumps(document, indent=1) + "\n")


def describe_machine() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "commit": commit.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def measure_ceilings() -> dict[str, float]:
    """Bytes/s of a large copy, read and write counted, and operations/s of a large bfloat16 GEMM."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.numel() / _device_seconds(lambda: target.copy_(source))
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    gemm = 2 * 8192**3 / _device_seconds(lambda: matrix @ matrix)
    return {"copy_bytes_per_s": copy, "matrix_flops_per_s": gemm}


def _device_seconds(action: Any, repeats: int = 20) -> float:
    for _ in range(3):
        action()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        action()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure_shape(shape: str, options: argparse.Namespace, ceilings: dict[str, float]) -> dict[str, Any]:
    folder = workloads.write_config(shape, Path("/tmp/lamina-shapes") / shape)
    started = time.perf_counter()
    runtime = Runtime.from_pretrained(
        folder,
        load_format="dummy",
        dtype="bfloat16",
        device="cuda",
        memory_fraction=0.85,
        max_model_len=16384,
        max_num_seqs=256,
        attention=options.attention,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        tensor_parallel=options.tensor_parallel,
        pipeline_parallel=options.pipeline_parallel,
        compile=CompileConfig(cuda_graphs=options.cuda_graphs),
        cache_dir=options.cache_dir,
    )
    with runtime:
        result: dict[str, Any] = {
            "load_s": time.perf_counter() - started,
            "settings": vars(options) | {"output": None},
        }
        _generate(runtime, workloads.prompts(1, PROMPT, 9), 8)
        result["stats_after_start"] = runtime.stats()
        print(
            shape,
            "start",
            {k: round(v, 2) for k, v in runtime.stats()["startup"].items() if k != "overlapped"},
            flush=True,
        )
        while runtime.idle():  # captures what is left, as a server does that nobody asks anything
            pass
        given = runtime, shape
        result["decode_ms"] = {batch: decode(*given, batch, options, ceilings) for batch in options.batches}
        result["first_token_ms"] = {length: prefill(*given, length, options) for length in options.prefills}
        if not options.no_mixed:
            result["mixed_tokens_per_s"] = mixed(runtime, shape)
        result["stats"] = runtime.stats()
        print(
            shape,
            "graphs",
            {k: v for k, v in runtime.stats()["cuda_graphs"].items() if k != "sizes"},
            flush=True,
        )
    return result


def _generate(
    runtime: Runtime, prompts: list[list[int]], lengths: int | list[int], temperature: float = 0.0
) -> float:
    """Seconds to answer all prompts."""
    many = lengths if isinstance(lengths, list) else [lengths] * len(prompts)
    params = [
        SamplingParams(max_tokens=length, ignore_eos=True, temperature=temperature, detokenize=False)
        for length in many
    ]
    started = time.perf_counter()
    runtime.generate(prompts, params)
    return time.perf_counter() - started


def decode(
    runtime: Runtime, shape: str, batch: int, options: argparse.Namespace, ceilings: dict[str, float]
) -> dict[str, float]:
    """Milliseconds of a decode step: a long answer less a short one, over the steps between."""
    times = []
    for repeat in range(options.repeats):
        short = _generate(runtime, workloads.prompts(batch, PROMPT, 100 + batch * 10 + repeat), 1)
        long = _generate(runtime, workloads.prompts(batch, PROMPT, 500 + batch * 10 + repeat), 1 + DECODED)
        times.append((long - short) / DECODED * 1e3)
    read = workloads.bytes_read(shape, options.quantization)
    cache_bytes = workloads.cache_bytes_per_token(shape) // (2 if options.kv_cache_dtype == "fp8" else 1)
    read += cache_bytes * (PROMPT + DECODED // 2) * batch
    operations = 2 * workloads.weights_read(shape) * batch
    floor = max(read / ceilings["copy_bytes_per_s"], operations / ceilings["matrix_flops_per_s"])
    floor /= options.tensor_parallel
    figures = {"median": statistics.median(times), "min": min(times), "max": max(times), "floor": floor * 1e3}
    print(shape, "decode batch", batch, {k: round(v, 3) for k, v in figures.items()}, flush=True)
    return figures


def prefill(runtime: Runtime, shape: str, length: int, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds from a prompt to its first token."""
    times = [
        _generate(runtime, workloads.prompts(1, length, 900 + length + repeat), 1) * 1e3
        for repeat in range(options.repeats)
    ]
    figures = {"median": statistics.median(times), "min": min(times), "max": max(times)}
    print(shape, "first token", length, {k: round(v, 2) for k, v in figures.items()}, flush=True)
    return figures


def mixed(runtime: Runtime, shape: str) -> dict[str, float]:
    """Output tokens/s of 256 requests of mixed lengths, greedy and sampled."""
    figures = {}
    for name, seed, temperature in (("sampled", 0, 0.6), ("greedy", 1, 0.0)):
        prompts, lengths = workloads.mixed(seed=seed)
        figures[name] = sum(lengths) / _generate(runtime, prompts, lengths, temperature)
        print(shape, "mixed", name, round(figures[name]), "tokens/s", flush=True)
    return figures


if __name__ == "__main__":
    main()
