"""Tokens/s with adapters beside those of the base model: decode steps of a runtime on one GPU, in turns.

`plain` is a runtime without room for adapters; `room` the base model in a runtime with room, whose steps are
to cost nothing more; `adapters` requests of all adapters in turn. With --leave-out `without` is the same, by
a plan without these passes: linear_lora, for projections and adapters one after the other. Weights are
random. A decode step is a long answer less a short one, over the steps between. Exits with 1 where a ratio to
`plain` is below its bound.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import workloads
from made_up_weights import write_adapters

from lamina import CompileConfig, LoRAConfig, Runtime, SamplingParams
from lamina.compiler.passes import all_but

RESULTS = Path(__file__).resolve().parent / "results" / "gpu_lora.json"
PROMPT, NUM_IDS = 128, 1000
BOUNDS = {"room": 0.99, "adapters": 0.88}  # of the tokens/s of `plain`, by the medians


def main() -> None:
    """Print a line for each batch, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="1b or 8b, or a folder with a config.json")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32])
    parser.add_argument(
        "--decoded", type=int, default=128, help="steps between a short answer and a long one"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--leave-out", nargs="+", metavar="PASS", help="linear_lora")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    document = {"date": time.strftime("%Y-%m-%d"), "settings": {k: str(v) for k, v in vars(options).items()}}
    options.output.write_text(json.dumps(document | {"batches": found}, indent=1) + "\n")
    ratios = [(name, one["ratios"][name]) for one in found.values() for name in BOUNDS]
    sys.exit(any(ratio < BOUNDS[name] for name, ratio in ratios))


def measure(options: argparse.Namespace, folder: Path) -> dict[int, dict[str, Any]]:
    """Milliseconds of a step of each contender, and the ratios of their tokens/s to those of `plain`."""
    model = Path(options.model)
    if options.model in workloads.SHAPES:
        model = workloads.write_config(options.model, folder / options.model)
    names = [f"a{number}" for number in range(options.adapters)]
    paths = write_adapters(model, folder / "adapters", count=options.adapters, rank=options.rank)
    room = LoRAConfig(max_loras=options.adapters, max_lora_rank=options.rank)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(opened(model, options))
        roomy = stack.enter_context(opened(model, options, lora=room))
        contenders: dict[str, tuple[Runtime, list[Any]]]
        contenders = {"plain": (plain, [None]), "room": (roomy, [None]), "adapters": (roomy, names)}
        if options.leave_out:
            passes = CompileConfig(passes=all_but(*options.leave_out))
            without = stack.enter_context(opened(model, options, lora=room, compile=passes))
            contenders["without"] = without, names
        for runtime in {one for one, asked in contenders.values() if asked is names}:
            for name, path in zip(names, paths, strict=True):
                runtime.load_adapter(name, path)
        return {batch: in_turns(contenders, batch, options) for batch in options.batches}


def opened(model: Path, options: argparse.Namespace, **settings: Any) -> Runtime:
    """A runtime with random weights and a cache for the largest batch."""
    started, length = time.perf_counter(), PROMPT + options.decoded + 64
    runtime = Runtime.from_pretrained(
        model,
        load_format="dummy",
        dtype="bfloat16",
        device=options.device,
        max_model_len=length,
        max_num_seqs=max(options.batches),
        num_kv_blocks=2 + max(options.batches) * (1 + length // 16),
        cache_dir=options.cache_dir,
        **settings,
    )
    print(f"opened in {time.perf_counter() - started:.1f} s", flush=True)
    return runtime


def in_turns(
    contenders: dict[str, tuple[Runtime, list[Any]]], batch: int, options: argparse.Namespace
) -> dict[str, Any]:
    """What steps of so many requests take; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(options.repeats + 1):
        for name, (runtime, adapters) in contenders.items():
            short, long = (
                answer(runtime, adapters, batch, length, repeat) for length in (1, 1 + options.decoded)
            )
            if repeat:
                times[name].append((long - short) / options.decoded * 1e3)
    medians = {name: statistics.median(each) for name, each in times.items()}
    ratios = {name: medians["plain"] / medians[name] for name in contenders if name != "plain"}
    shown = {name: round(value, 3) for name, value in medians.items()}
    print(
        f"batch {batch}: ms a step {shown}, tokens/s { ({k: round(v, 4) for k, v in ratios.items()}) }",
        flush=True,
    )
    return {"step_ms": times, "ratios": ratios}


def answer(runtime: Runtime, adapters: list[Any], batch: int, length: int, seed: int) -> float:
    """Seconds to answer prompts that were not asked before, each with the next adapter."""
    params = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0, detokenize=False)
    submissions: list[Any] = []
    for number, prompt in enumerate(workloads.prompts(batch, PROMPT, seed * 1000 + length)):
        asked = runtime._options({"adapter": adapters[number % len(adapters)]})
        ids = [token % NUM_IDS for token in prompt]
        (answers,) = runtime._open_input.prepare_each([ids], params, asked)
        submissions += answers.submissions
    started = time.perf_counter()
    runtime._client.run(submissions)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
