"""What sampling parameters cost: a decode step of a full batch on one GPU, greedy beside every mixture."""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import workloads
from gpu import describe_machine

from lamina import Runtime, SamplingParams

RESULT = Path(__file__).resolve().parent / "results" / "gpu_sampling.json"
PROMPT = 128
Settings = list[dict[str, Any]]  # one after another, over and over
FILTERS: Settings = [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}]
ADJUSTMENTS: Settings = [
    {"frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"repetition_penalty": 1.1, "top_k": 40, "top_p": 0.95},
    {"logit_bias": {1000 + i: 2.0 for i in range(8)}},
]
# Random weights make logits with a deviation of about one; so cold, their odds are like a trained model's.
SHARP = 0.2
CASES: dict[str, Settings] = {
    "greedy": [{"temperature": 0}],
    "temperature": [{}],
    "filters": FILTERS,
    "adjustments, greedy": [{"temperature": 0, **own} for own in ADJUSTMENTS],
    "mixed": [{"temperature": 0}, *FILTERS, *ADJUSTMENTS],
    "mixed, sharp": [
        {"temperature": 0},
        *({"temperature": SHARP, **own} for own in (*FILTERS, *ADJUSTMENTS)),
    ],
}


def main() -> None:
    """Measure in rounds of all cases, print a line each at the end, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1b", choices=list(workloads.SHAPES))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    folder = workloads.write_config(options.shape, Path("/tmp/lamina-shapes") / options.shape)
    settings: dict[str, Any] = {"dtype": "bfloat16", "device": "cuda", "load_format": "dummy"}
    settings |= {"max_model_len": 2048, "max_num_seqs": options.batch}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in options.cases}
    with Runtime.from_pretrained(folder, **settings) as runtime:
        for number in range(options.rounds + 1):
            turn = number % len(options.cases)  # whoever comes first finds the GPU at another clock
            for name in (*options.cases[turn:], *options.cases[:turn]):
                taken = seconds_of_answers(runtime, options, CASES[name], seed=number)
                if number:  # the first round loads kernels
                    times[name].append(taken)
    base = milliseconds_a_step(times[options.cases[0]], options.steps)
    figures = {}
    for name, taken in times.items():
        step = milliseconds_a_step(taken, options.steps)
        figures[name] = {"ms_a_step": step, "ratio": step / base, "seconds_short_and_long": taken}
        print(f"{name:22} {step:7.3f} ms a step, {step / base:.3f} of {options.cases[0]}")
    document = {"machine": describe_machine(), "settings": vars(options) | {"output": None}, "cases": figures}
    options.output.write_text(json.dumps(document, indent=1) + "\n")


def seconds_of_answers(
    runtime: Runtime, options: argparse.Namespace, settings: Settings, seed: int
) -> tuple[float, float]:
    """Of one token each, and of as many as there are steps more."""
    seconds = []
    for length in (1, 1 + options.steps):
        prompts = workloads.prompts(options.batch, PROMPT, 100 * seed + length)
        params = [
            SamplingParams(
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
                seed=row,
                **{"temperature": 0.8, **settings[row % len(settings)]},
            )
            for row in range(options.batch)
        ]
        started = time.perf_counter()
        runtime.generate(prompts, params)
        seconds.append(time.perf_counter() - started)
    return seconds[0], seconds[1]


def milliseconds_a_step(taken: list[tuple[float, float]], num_steps: int) -> float:
    """The median of long answers less that of short ones: one slow prompt spoils no median."""
    short, long = (statistics.median(column) for column in zip(*taken, strict=True))
    return (long - short) / num_steps * 1e3


if __name__ == "__main__":
    main()
