"""Perplexity of a fixed text: Lamina in each precision, or quantized, beside transformers."""

import argparse
import datetime
import functools
import hashlib
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics  # Python's own reference, under its licence
from typing import Any

import torch

from lamina import Runtime, quantize
from lamina.common.store import Store
from lamina.models.checkpoints.source import resolve_source
from lamina.runtime.perplexity import logprobs_of, perplexity_of
from lamina.runtime.tokenization.text_windows import WINDOW

RESULTS = Path(__file__).resolve().parent / "results"
CHAPTERS = ("execmodel", "class", "exceptions", "naming", "objects", "types", "compound", "with")
OURS: Mapping[str, Mapping[str, Any]] = {
    "lamina float32": {"dtype": "float32"},
    "lamina bfloat16": {"dtype": "bfloat16"},
    "lamina bfloat16, int8": {"dtype": "bfloat16", "quantization": "int8"},
    "lamina float32, FP8 KV cache": {"dtype": "float32", "kv_cache_dtype": "fp8"},
    "lamina bfloat16, FP8 KV cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "lamina bfloat16, int8 KV cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "lamina float32, int8": {"dtype": "float32", "quantization": "int8"},
    "lamina bfloat16, q8": {"dtype": "bfloat16", "quantization": "q8"},
    "lamina bfloat16, q4": {"dtype": "bfloat16", "quantization": "q4"},
}
AS_IT_LIES = "lamina bfloat16, the file's blocks"
QUANTIZED: Mapping[str, Mapping[str, Any]] = {
    "w4a16, groups of 64": {"scheme": "w4a16", "group_size": 64},
    "w4a16, groups of 64 with zero points": {"scheme": "w4a16", "group_size": 64, "symmetric": False},
    "w4a16, groups of 32": {"scheme": "w4a16", "group_size": 32},
    "fp8": {"scheme": "fp8"},
    "int8": {"scheme": "int8"},
    "w4a16, rows": {"scheme": "w4a16", "group_size": -1},
}
CALIBRATION_TOKENS = 8192
ORACLE = "transformers float32"
Windows = Sequence[list[int]]
Logprobs = list[float]  # of each token but a window's first


def main() -> None:
    """Measure, write benchmarks/results/NAME.json, print the table."""
    options = parse_arguments()
    folder = resolve_source(options.model, store=Store())
    windows = read_windows(folder, options.tokens)
    contenders: dict[str, Callable[[], Logprobs]] = {
        ORACLE: lambda: by_transformers(folder, "float32", windows)
    }
    if options.quantized:
        contenders["lamina bfloat16"] = lambda: by_lamina(folder, OURS["lamina bfloat16"], windows)
        for how, is_gptq in (("to nearest", False), ("by GPTQ", True)):
            for name, recipe in QUANTIZED.items():
                contenders[f"{name}, {how}"] = functools.partial(quantized, folder, recipe, is_gptq, windows)
    else:
        contenders["transformers bfloat16"] = lambda: by_transformers(folder, "bfloat16", windows)
        for name, settings in OURS.items():
            contenders[name] = functools.partial(by_lamina, folder, settings, windows)
        if options.model.endswith(".gguf"):
            contenders[AS_IT_LIES] = lambda: by_lamina(Path(options.model), {"dtype": "bfloat16"}, windows)
    if options.contenders:
        contenders = {name: contenders[name] for name in options.contenders}
    logprobs: dict[str, Logprobs] = {}
    for name, measure in contenders.items():
        started = time.perf_counter()
        logprobs[name] = measure()
        perplexity = perplexity_of(logprobs[name])
        print(f"{name}: {perplexity:.4f} in {time.perf_counter() - started:.0f} s", file=sys.stderr)
        document = report(options, windows, logprobs)
        (RESULTS / f"{options.name}.json").write_text(json.dumps(document, indent=1) + "\n")
    print(render(document))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a model folder, a .gguf file or a hub id")
    parser.add_argument("--tokens", type=int, default=8 * WINDOW)
    parser.add_argument("--quantized", action="store_true", help="checkpoints that lamina quantize writes")
    parser.add_argument("--contenders", nargs="+", help="names of some; the first is who others are held to")
    parser.add_argument("--name", default="perplexity", help="name of the result file")
    return parser.parse_args()


def read_windows(folder: Path, num_tokens: int) -> list[list[int]]:
    """The first tokens of the text, in windows."""
    from transformers import AutoTokenizer

    text = "\n\n".join(topics[name] for name in CHAPTERS)
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"][:num_tokens]
    return [ids[start : start + WINDOW] for start in range(0, len(ids) - 1, WINDOW)]


def by_transformers(folder: Path, dtype: str, windows: Windows) -> Logprobs:
    from transformers import AutoModelForCausalLM

    return logprobs_by(AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)), windows)


def logprobs_by(model: Any, windows: Windows) -> Logprobs:
    """What a model of transformers finds of each token but a window's first."""
    logprobs: Logprobs = []
    for ids in windows:
        with torch.inference_mode():
            logits = model.eval()(torch.tensor([ids])).logits[0, :-1].float()
        logprobs += logits.log_softmax(dim=-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return logprobs


def by_lamina(folder: Path, settings: Mapping[str, Any], windows: Windows) -> Logprobs:
    """What the runtime reports of a prompt's own tokens, run eagerly: there is nothing to be quick for."""
    settings = {"device": "cpu", "compile": False, "max_model_len": WINDOW + 1, **settings}
    with Runtime.from_pretrained(folder, **settings) as runtime:
        return logprobs_of(runtime, windows)


def quantized(folder: Path, recipe: Mapping[str, Any], is_gptq: bool, windows: Windows) -> Logprobs:
    """A checkpoint of that recipe, served; GPTQ looks at chapters of the reference that are not measured."""
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch, "calibration.txt")
        text.write_text("\n\n".join(topics[name] for name in sorted(topics) if name not in CHAPTERS))
        given = (
            {"gptq": True, "calibration": text, "calibration_tokens": CALIBRATION_TOKENS} if is_gptq else {}
        )
        made = quantize(folder, Path(scratch, "model"), device="cpu", **recipe, **given)
        return by_lamina(made.folder, {"dtype": "bfloat16"}, windows)


def report(options: argparse.Namespace, windows: Windows, logprobs: Mapping[str, Logprobs]) -> dict[str, Any]:
    exact = next(iter(logprobs.values()))
    text = json.dumps([list(ids) for ids in windows])
    return {
        "model": Path(options.model).name,
        "text": f"{', '.join(CHAPTERS)} of Python {platform.python_version()}'s reference",
        "sha256_of_ids": hashlib.sha256(text.encode()).hexdigest(),
        "window": WINDOW,
        "num_tokens": len(exact),
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["benchmarks/perplexity.py", *sys.argv[1:]]),
        "torch": torch.__version__,
        "results": [
            {
                "name": name,
                "perplexity": round(perplexity_of(values), 4),
                "by_the_oracles": round(perplexity_of(values) / perplexity_of(exact), 5),
                "mean_absolute_difference": round(_mean_difference(values, exact), 5),
            }
            for name, values in logprobs.items()
        ],
    }


def _mean_difference(values: Logprobs, exact: Logprobs) -> float:
    """Of a token's log-probability, in nats."""
    pairs = zip(values, exact, strict=True)
    return sum(abs(value - right) for value, right in pairs) / len(exact)


def render(document: Mapping[str, Any]) -> str:
    """Markdown: a row a contender."""
    first = document["results"][0]["name"]
    lines = [
        f"| {document['num_tokens']} tokens | perplexity | by that of {first} | nats off a token |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['name']} | {row['perplexity']:.3f} | {row['by_the_oracles']:.4f} "
        f"| {row['mean_absolute_difference']:.4f} |"
        for row in document["results"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
