"""What answers in a given form cost: decode rates with none, one and all of a batch constrained, in turns.

Each round asks the same prompts three times; the answers have the same number of tokens, as the form is an
array that outlasts them. What counts is the ratio of each pair of a round.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import workloads
from made_up_model import write_model

from lamina import Runtime, SamplingParams, StructuredOutputs

RESULTS = Path(__file__).resolve().parent / "results" / "structured_rates.json"
PROMPT, DECODED = 128, 128
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["admin", "author", "reader"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,8}$"}, "maxItems": 4},
        "email": {"anyOf": [{"type": "string", "format": "email"}, {"type": "null"}]},
    },
    "required": ["name", "age", "role", "tags", "email"],
    "additionalProperties": False,
}
FORM = StructuredOutputs(json={"type": "array", "items": PERSON, "minItems": DECODED})


def main() -> None:
    """Print a line a batch, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8b", choices=workloads.SHAPES)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help="a checkpoint in place of random weights")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jump-forward", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--cache-dir")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    shape = options.model.name if options.model else options.shape
    document: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "shape": shape, "batches": {}}
    with tempfile.TemporaryDirectory() as folder, _open(options, Path(folder)) as runtime:
        for batch in options.batches:
            document["batches"][batch] = measure(runtime, batch, options.rounds)
            print(batch, document["batches"][batch], flush=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")


def _open(options: argparse.Namespace, folder: Path) -> Runtime:
    return Runtime.from_pretrained(
        options.model or write_model(options.shape, folder),
        load_format="auto" if options.model else "dummy",
        device=options.device,
        max_num_seqs=max(options.batches),
        max_model_len=1024,
        memory_fraction=0.85 if options.device == "cuda" else 0.3,
        cache_dir=options.cache_dir,
        jump_forward=options.jump_forward,
    )


def measure(runtime: Runtime, batch: int, rounds: int) -> dict[str, Any]:
    """Tokens/s by the number of constrained requests, and the medians of their ratios to none."""
    counts, size = sorted({0, 1, batch}), runtime.tokenizer.size
    rates: dict[int, list[float]] = {count: [] for count in counts}
    for number in range(rounds + 1):
        drawn = workloads.prompts(batch, PROMPT, 1000 * batch + number)
        prompts = [[id_ % size for id_ in prompt] for prompt in drawn]
        runtime.generate(prompts, SamplingParams(max_tokens=1))  # all find them in the prefix cache then
        for count in counts if number % 2 else reversed(counts):
            rate = _rate(runtime, prompts, count, seed=number)
            if number:  # the first round compiles the form, and makes what is made at first use
                rates[count].append(rate)
    figures: dict[str, Any] = {
        f"{count} constrained, tokens/s": statistics.median(rates[count]) for count in counts
    }
    figures["forced tokens so far"] = runtime.stats()["forced_tokens"]
    for count in counts[1:]:
        ratios = [own / free for own, free in zip(rates[count], rates[0], strict=True)]
        figures[f"{count} constrained over none"] = {
            "median": round(statistics.median(ratios), 4),
            "all": [round(ratio, 4) for ratio in ratios],
        }
    return figures


def _rate(runtime: Runtime, prompts: list[list[int]], num_constrained: int, *, seed: int) -> float:
    free = SamplingParams(max_tokens=DECODED, temperature=1.0, seed=seed, ignore_eos=True)
    bound = SamplingParams(max_tokens=DECODED, temperature=1.0, seed=seed, structured_outputs=FORM)
    params = [bound if number < num_constrained else free for number in range(len(prompts))]
    started = time.perf_counter()
    outputs = runtime.generate(prompts, params)
    seconds = time.perf_counter() - started
    lengths = {len(output.outputs[0].token_ids) for output in outputs}
    assert lengths == {DECODED}, lengths
    return len(prompts) * DECODED / seconds


if __name__ == "__main__":
    main()
