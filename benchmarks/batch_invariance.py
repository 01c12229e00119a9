"""What batch invariance costs on one GPU: decode steps and prefill, with the mode and without.

Each shape has random weights and is compiled once. The same steps are then taken by the kernels of the mode,
in place of those that a runtime without it chooses: captured anew, on the same weights and caches. With
--gemms those of the shape are timed alone, by each split-K, and with --mixes logits of a runtime that has the
mode are compared bit for bit. With --fixed-splits attention is by fixed splits.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import workloads
from gpu import describe_machine
from gpu_steps import BLOCK_SIZE, DecodeStep, look_at

from lamina import CompileConfig, Runtime, SamplingParams
from lamina.custom_ops.linear import _cuda as plain
from lamina.custom_ops.linear import autotune, choices
from lamina.custom_ops.linear_silu_and_mul import _cuda as with_gate
from lamina.custom_ops.paged_attention import _cuda, _fixed_splits
from lamina.runtime.batch_invariance import check_batch_invariance
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.startup import kernel_choice
from lamina.runtime.startup.builder import gemms_of

RESULT = Path(__file__).resolve().parent / "results" / "batch_invariance.json"
QWEN3 = {  # of 4B
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rope_scaling": None,
}
DEVICE = torch.device("cuda", 0)
MANY = (512, 2048, 8192)  # rows of x, of prefill
SPLITS = (1, 2, 4)


def main() -> None:
    """Print figures of each shape, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["8b", "qwen3-4b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128, 256])
    parser.add_argument("--context", type=int, default=640, help="tokens of each request")
    parser.add_argument("--prompts", nargs="+", type=int, default=[128, 512, 2048, 4096])
    parser.add_argument("--mixes", type=int, default=0, help="random mixes to compare bit for bit")
    parser.add_argument("--gemms", action="store_true", help="time the GEMMs by each split-K too")
    parser.add_argument(
        "--fixed-splits", action=argparse.BooleanOptionalAction, default=_fixed_splits.ENABLED
    )
    parser.add_argument(
        "--split-keys", type=int, default=_fixed_splits.SPLIT_KEYS, help="keys of a fixed split, whole tiles"
    )
    parser.add_argument("--steps", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--kernels", action="store_true", help="print what each kernel adds to a decode step")
    parser.add_argument("--cache-dir")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    workloads.SHAPES["qwen3-4b"] = QWEN3
    _fixed_splits.ENABLED, _fixed_splits.SPLIT_KEYS = options.fixed_splits, options.split_keys
    _fixed_splits.WHOLE_KEYS = options.split_keys
    document: dict[str, Any] = {
        "machine": describe_machine(),
        "context": options.context,
        "split_keys": options.split_keys if options.fixed_splits else None,
        "shapes": {},
    }
    for shape in options.shapes:
        found = document["shapes"][shape] = {}
        if options.steps:
            found |= timed(shape, options)
            print_ratios(shape, found)
        if options.gemms:
            found["gemms"] = gemms(shape)
        if options.mixes:
            found["mixes"] = mixes(shape, options)
        options.output.write_text(json.dumps(document, indent=1) + "\n")


def settings(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """Of a runtime with random weights."""
    folder = workloads.write_config(shape, Path("/tmp/lamina-shapes") / shape)
    blocks_each = -(-options.context // BLOCK_SIZE)
    return {
        "model": folder,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "device": "cuda",
        "max_model_len": 8192,
        "max_num_seqs": max(options.batches),
        "num_kv_blocks": max(1024, max(options.batches) * blocks_each + 16),
        "block_size": BLOCK_SIZE,
        "prefix_cache": False,
        "compile": CompileConfig(cuda_graphs="lazy", verify=False),
        "cache_dir": options.cache_dir,
    }


def timed(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of decode steps by batch, and of prefill by the length of a prompt, of both modes."""
    started = time.perf_counter()
    found: dict[str, Any] = {}
    with Runtime.from_pretrained(**settings(shape, options)) as runtime:
        print(f"{shape}: ready in {time.perf_counter() - started:.0f} s", flush=True)
        for mode in ("plain", "invariant"):
            if mode == "invariant":
                turn_invariant(runtime, options.batches)
                print(f"{shape}: in the mode in {time.perf_counter() - started:.0f} s", flush=True)
            steps = (DecodeStep(runtime, batch, options.context) for batch in options.batches)
            decode = {step.batch: milliseconds(step, f"{shape} {mode}", options.kernels) for step in steps}
            runtime._loaded.runner.drop_captures()
            prefill = {length: prefilled(runtime, length) for length in options.prompts}
            found[mode] = {"decode_ms": decode, "prefill_ms": prefill}
    torch.cuda.empty_cache()
    return found


def milliseconds(step: DecodeStep, title: str, kernels: bool) -> float:
    """Of a step, the median; kernels: print what each adds."""
    if kernels:
        look_at(step, title)
    return statistics.median(step.milliseconds())


def turn_invariant(runtime: Runtime, batches: list[int]) -> None:
    """Have every later step of this process taken by the kernels of the mode, as a runtime with it would."""
    loaded = runtime._loaded
    attention = loaded.runner._attention
    resolved = loaded.resolved
    attention._flags = (True,)
    sizes = DEVICE, resolved.dtype, resolved.dtype, resolved.model.head_dim, resolved.block_size
    rotating = _cuda.find_rotating(*sizes, batch_invariant=True)
    attention._backend = replace(attention._backend, rotating_decode=rotating)
    for module, launch in ((plain, plain.launch), (with_gate, with_gate.launch)):
        module.config_of = module.config_of_one_order
        module.launch = partial(launched_in_order, launch)
    gemms = [
        replace(gemm, batch_invariant=True) for gemm in gemms_of([loaded.compiled.plan], loaded.resolved)
    ]
    buckets = {choices.bucket_of(batch) for batch in batches}
    name = choices.device_name_of(DEVICE, torch.bfloat16)
    sites = kernel_choice.sites_of(gemms, DEVICE, torch.bfloat16)
    unknown = [site for site in sites if site.num_tokens in buckets and not choices.is_measured(site, name)]
    autotune.autotune(unknown, DEVICE, torch.bfloat16)


def launched_in_order(launch: Any, x: Any, weight: Any, bias: Any, config: Any, _: bool = False) -> Any:
    return launch(x, weight, bias, config, True)


def prefilled(runtime: Runtime, length: int) -> float:
    """Milliseconds to the one token of an answer, the best of some."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    taken = []
    for prompt in workloads.prompts(6, length, seed=length):
        torch.cuda.synchronize()
        started = time.perf_counter()
        runtime.generate([prompt], params)
        taken.append((time.perf_counter() - started) * 1e3)
    return min(taken)


def print_ratios(shape: str, found: dict[str, Any]) -> None:
    for what in ("decode_ms", "prefill_ms"):
        for size, without in found["plain"][what].items():
            within = found["invariant"][what][size]
            figures = f"{without:9.3f} {within:9.3f} {within / without:6.3f}"
            print(f"{shape:10} {what:10} {size:6} {figures}", flush=True)


def gemms(shape: str) -> list[dict[str, Any]]:
    """Best microseconds of each GEMM by split-K, and of the library, by the number of rows."""
    sizes, lines = workloads.SHAPES[shape], []
    hidden, width = sizes["hidden_size"], sizes["head_dim"]
    queries, keys = sizes["num_attention_heads"] * width, sizes["num_key_value_heads"] * width
    of_model: list[tuple[choices.Kind, int, int]] = [
        ("linear", queries + 2 * keys, hidden),
        ("linear", hidden, queries),
        ("gated", 2 * sizes["intermediate_size"], hidden),
        ("linear", hidden, sizes["intermediate_size"]),
    ]
    processors = choices.processors_of(DEVICE)
    for kind, n, k in of_model:
        chosen = choices.one_order(n, k, processors)
        for num_tokens in (*choices.BUCKETS, *MANY):
            site = choices.Site(kind=kind, num_tokens=min(num_tokens, choices.BUCKETS[-1]), n=n, k=k)
            line: dict[str, Any] = {"kind": kind, "n": n, "k": k, "rows": num_tokens, "taken": chosen}
            ways = autotune.ways_of(replace(site, num_tokens=num_tokens), DEVICE, torch.bfloat16)
            line["library"] = autotune._microseconds(ways.library, ways.weights)
            for split_k in SPLITS if k % 512 == 0 else (1,):
                of_order = replace(site, split_k=split_k)
                ways = autotune.ways_of(replace(of_order, num_tokens=num_tokens), DEVICE, torch.bfloat16)
                configs = choices.candidates(of_order, processors)
                if num_tokens > choices.BUCKETS[-1]:
                    configs = tuple(config for config in configs if config.clusters)
                if configs:
                    line[f"split {split_k}"] = min((microseconds(ways, config), config) for config in configs)
            lines.append(line)
            print(line, flush=True)
        print_sums(lines[-len(choices.BUCKETS) - len(MANY) :])
    return lines


def print_sums(lines: list[dict[str, Any]]) -> None:
    """What each split-K of one weight takes in all, up to 256 rows: the least is the one to have."""
    few = [line for line in lines if line["rows"] <= choices.BUCKETS[-1]]
    sums = {
        split_k: sum(line[f"split {split_k}"][0] for line in few)
        for split_k in SPLITS
        if all(f"split {split_k}" in line for line in few)
    }
    print(f"{few[0]['kind']} [{few[0]['n']}, {few[0]['k']}]: us by split-K {sums}, taken {few[0]['taken']}")


def microseconds(ways: autotune.Ways, config: choices.GemmConfig) -> float:
    return autotune._microseconds(lambda weight: ways.ours(config, weight), ways.weights)


def mixes(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """So many random mixes, whose logits are compared with those of each request alone."""
    own = settings(shape, options) | {"max_num_seqs": 32, "max_model_len": 2048, "num_kv_blocks": 1024}
    own |= {"compile": CompileConfig(verify=False, batch_invariant=True), "prefix_cache": True}
    began: list[tuple[str, float]] = []

    def note(stage: str, _: float, what: str) -> None:
        if stage == "verify":
            began.append((what, time.perf_counter()))

    note("verify", 0, "start")
    found = check_batch_invariance(RuntimeConfig(**own), [], options.mixes, note)
    note("verify", 1, "end")
    seconds = {name: round(until - since, 1) for (name, since), (_, until) in pairwise(began)}
    verdict = "right" if found.is_right else f"WRONG: {found.mismatches[:3]}, first {found.first}"
    print(f"{shape}: {found.num_mixes} mixes, {found.num_logits} logits, s {seconds}: {verdict}", flush=True)
    return {
        "mixes": found.num_mixes,
        "logits": found.num_logits,
        "preemptions": found.num_preemptions,
        "is_right": found.is_right,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
