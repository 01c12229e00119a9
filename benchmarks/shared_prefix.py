"""Time to the first token of many requests that begin alike, with the prefix cache and without."""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import workloads

from lamina import CompileConfig, Runtime, SamplingParams

RESULTS = Path(__file__).resolve().parent / "results"
NUM_IDS = 300  # of the tokens in prompts, so that every model has them


def main() -> None:
    """Print a line for each way, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="1b, 8b (their shapes, random weights), or a model folder or file")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--common", type=int, default=2048, help="tokens that all prompts begin with")
    parser.add_argument("--own", type=int, default=64, help="tokens of each prompt that are its own")
    parser.add_argument("--answer", type=int, default=8)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS / "shared_prefix.json")
    options = parser.parse_args()
    document: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(options).items()}}
    for prefix_cache in (False, True):
        figures = document["with" if prefix_cache else "without"] = measure(options, prefix_cache)
        print(options.model, "with" if prefix_cache else "without", figures, flush=True)
    ratio = document["with"]["first_token_mean_s"] / document["without"]["first_token_mean_s"]
    document["ratio"] = round(ratio, 4)
    print(options.model, "first token, with / without:", document["ratio"], flush=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")


def measure(options: argparse.Namespace, prefix_cache: bool) -> dict[str, float]:
    """Seconds to the first token of each request, all queued at once, and what was found in the cache."""
    settings: dict[str, Any] = {"compile": not options.eager and CompileConfig()}
    model: str | Path = options.model
    if options.model in workloads.SHAPES:
        model = workloads.write_config(options.model, Path("/tmp/lamina-shapes") / options.model)
        settings |= {"load_format": "dummy", "dtype": "bfloat16"}
    length = options.common + options.own + options.answer
    with Runtime.from_pretrained(
        model, device=options.device, max_model_len=length, prefix_cache=prefix_cache, **settings
    ) as runtime:
        params = SamplingParams(max_tokens=options.answer, temperature=0, ignore_eos=True, detokenize=False)
        prompts = make_prompts(options)
        runtime.generate([prompts[-1][::-1]], params)  # warm: nothing that the others can find
        started = time.perf_counter()
        outputs = runtime.generate(prompts[:-1], params)
        seconds = time.perf_counter() - started
    waits = [output.seconds_to_first_token or 0.0 for output in outputs]
    return {
        "first_token_mean_s": round(statistics.mean(waits), 5),
        "first_token_max_s": round(max(waits), 5),
        "whole_s": round(seconds, 5),
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
    }


def make_prompts(options: argparse.Namespace) -> list[list[int]]:
    """Prompts that begin alike and end each in its own way, one more than are measured."""
    (common,) = workloads.prompts(1, options.common, 1)
    own = workloads.prompts(options.requests + 1, options.own, 2)
    return [[token % NUM_IDS for token in common + tail] for tail in own]


if __name__ == "__main__":
    main()
