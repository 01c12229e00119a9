"""Drafts of n-grams on a CPU: steps, CPU seconds and tokens a second beside decoding without, by turns.

Answers that copy are asked for by prompts of real text, code of this repository and its documentation, to be
repeated with or without a change. Adversarial ones are drawn hot from prompts in which every pair of tokens
comes again with another token after it, so that drafts are found and do not hold. Both runtimes answer each
prompt by turns in one process; CPU seconds are the process's, as a busy machine has no better clock.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from lamina import NGram, Runtime, SamplingParams
from lamina.cli.info import describe_machine

ROOT = Path(__file__).resolve().parent.parent
RESULT = Path(__file__).resolve().parent / "results" / "speculation_cpu.json"
DEMO = ROOT / "cache_dir" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TASKS = {
    "edit this code": (
        "runtime/scheduler/budget.py",
        "Write this code again, with budget in capitals:",
    ),
    "repeat this code": ("runtime/scheduler/faults.py", "Repeat this code word for word:"),
    "quote this text": ("docs/design.md", "Quote this text word for word:"),
    "quote this page": ("docs/request_walk.md", "Quote this text word for word:"),
}
Figures = dict[str, Any]


def main() -> None:
    """Print a line a prompt, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--length", type=int, default=900, help="characters of real text in a prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    settings: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 8, "prefix_cache": False}
    settings |= {"compile": not options.eager, "device": "cpu"}
    machine = {name: describe_machine()[name] for name in ("cpu", "cores", "threads", "python", "versions")}
    document: Figures = {"machine": machine, "model": Path(options.model).name, "k": options.k}
    with (
        Runtime.from_pretrained(options.model, **settings) as plain,
        Runtime.from_pretrained(options.model, speculative=NGram(k=options.k), **settings) as drafting,
    ):
        for name, prompt, params in asked(plain, options):
            found = document[name] = compare(plain, drafting, prompt, params, options.repeats)
            print(f"{name}: {json.dumps(found)}", flush=True)
            options.output.write_text(json.dumps(document, indent=1) + "\n")


def asked(runtime: Runtime, options: argparse.Namespace) -> list[tuple[str, Any, SamplingParams]]:
    """Names, prompts and parameters of all cases."""
    greedy = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    cases: list[tuple[str, Any, SamplingParams]] = []
    for name, (path, task) in TASKS.items():
        text = (ROOT / path).read_text(encoding="utf-8")[: options.length]
        begun = " ".join(text.split(" ")[:6])  # so that a small model knows what to do
        cases.append((name, f"{task}\n\n{text}\n\nHere it is again:\n\n{begun}", greedy))
    lots = random.Random(0)
    pairs = [(lots.randrange(1000, 9000), lots.randrange(1000, 9000)) for _ in range(6)]
    trap = [token for _ in range(20) for pair in pairs for token in (*pair, lots.randrange(1000, 9000))]
    hot = SamplingParams(
        temperature=1.0, top_k=4, max_tokens=options.tokens, ignore_eos=True, seed=1, detokenize=False
    )
    cases.append(("adversarial", trap, hot))
    hotter = SamplingParams(
        temperature=2.0, top_k=50, max_tokens=options.tokens, ignore_eos=True, seed=1, detokenize=False
    )
    cases.append(("adversarial, hotter", trap, hotter))
    return cases


def compare(plain: Runtime, drafting: Runtime, prompt: Any, params: SamplingParams, repeats: int) -> Figures:
    """Both by turns: steps, and ratios of CPU seconds and seconds for the tokens after the first."""
    found: dict[str, list[Figures]] = {"plain": [], "drafting": []}
    for _ in range(repeats + 1):  # the first builds, and captures
        for name, runtime in (("plain", plain), ("drafting", drafting)):
            found[name].append(answer(runtime, prompt, params))
    pairs = list(zip(found["plain"], found["drafting"], strict=True))[1:]
    counts = drafting.stats()["speculation"]
    return {
        "same_tokens": all(a["tokens"] == b["tokens"] for a, b in pairs),
        "steps": [pairs[0][0]["steps"], pairs[0][1]["steps"]],
        "fewer_steps": round(pairs[0][0]["steps"] / pairs[0][1]["steps"], 2),
        "cpu_speedup": [round(a["cpu_s"] / b["cpu_s"], 3) for a, b in pairs],
        "median_cpu_speedup": round(statistics.median(a["cpu_s"] / b["cpu_s"] for a, b in pairs), 3),
        "median_speedup": round(statistics.median(a["s"] / b["s"] for a, b in pairs), 3),
        "cpu_s_plain": round(statistics.median(a["cpu_s"] for a, _ in pairs), 3),
        "drafts_so_far": {name: counts[name] for name in ("draft_tokens", "accepted_tokens")},
    }


def answer(runtime: Runtime, prompt: Any, params: SamplingParams) -> Figures:
    """One streamed answer: its tokens, and steps and seconds from its first token to its end."""
    tokens: list[int] = []
    scheduler = runtime._loaded.core.scheduler
    first_cpu = first = 0.0
    first_step = 0
    for delta in runtime.stream(prompt, params):
        if not tokens:
            first_cpu, first, first_step = time.process_time(), time.perf_counter(), num_steps(scheduler)
        tokens += delta.token_ids
    cpu_s, seconds = time.process_time() - first_cpu, time.perf_counter() - first
    return {"tokens": tokens, "cpu_s": cpu_s, "s": seconds, "steps": num_steps(scheduler) - first_step}


def num_steps(scheduler: Any) -> int:
    """Steps launched so far."""
    return int(scheduler._in_flight.num_launched)


if __name__ == "__main__":
    main()
