"""The main job of an installed Lamina, in bf16, float32 and int8: main_job.py MODEL CACHE [EXPECTED].

Each in two processes: the second start may import neither Dynamo nor Inductor and writes the same ids. With
EXPECTED, a file that --write made elsewhere (from a checkout, with another torch), they are compared. It runs
with whatever torch is there: `python -m pip install --no-deps lamina-*.whl`, then this.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
}
QUESTION = "What is the capital of France, and what is it known for?"
COMPILERS = ("torch._dynamo", "torch._inductor")
MOST = 24  # tokens of an answer


def answer(name: str, model: str, cache: str, device: str) -> None:
    """One start: prints ids, text, what was compiled, which compilers were imported, as JSON."""
    import torch

    import lamina

    settings = SETTINGS[name] | {"cache_dir": cache, "device": device}
    with lamina.Runtime.from_pretrained(model, **settings) as runtime:
        params = lamina.SamplingParams(max_tokens=MOST, temperature=0)
        written = runtime.chat([{"role": "user", "content": QUESTION}], params).outputs[0]
        compiled = runtime.stats()["compile"]["compiled"]
    facts = {
        "torch": torch.__version__,
        "lamina": lamina.__file__,
        "token_ids": list(written.token_ids),
        "text": written.text,
        "compiled": compiled,
        "imported": [name for name in COMPILERS if name in sys.modules],
    }
    print(json.dumps(facts))


def start(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """answer() in a process of its own, from an empty folder."""
    folder = asked.cache / "empty"
    folder.mkdir(parents=True, exist_ok=True)
    cache = asked.cache / "cache"
    command = [sys.executable, Path(__file__).resolve(), asked.model, cache, "--answer", name]
    done = subprocess.run(
        [*map(str, command), "--device", asked.device],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def check(name: str, asked: argparse.Namespace, expected: dict[str, Any]) -> list[int]:
    """The ids of a cold and of a warm start, which are the same and those expected."""
    cold, warm = start(name, asked), start(name, asked)
    if warm["compiled"] or warm["imported"]:
        sys.exit(f"{name}: the second start compiled {warm['compiled']} pieces, imported {warm['imported']}")
    if cold["token_ids"] != warm["token_ids"]:
        sys.exit(f"{name}: the first start wrote {cold['text']!r}, the second {warm['text']!r}")
    if expected.get(name, cold["token_ids"]) != cold["token_ids"]:
        sys.exit(f"{name}: wrote {cold['token_ids']}; expected {expected[name]}")
    print(
        f"torch {cold['torch']} {name}: {cold['text']!r}, compiled {cold['compiled']}, then none", flush=True
    )
    return list(cold["token_ids"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=lambda path: Path(path).resolve())
    parser.add_argument("cache", type=lambda path: Path(path).resolve(), help="an empty folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=SETTINGS, nargs="+", default=list(SETTINGS))
    parser.add_argument("--expected", type=Path, help="ids that --write left")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--answer", choices=SETTINGS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.answer:
        answer(asked.answer, str(asked.model), str(asked.cache), asked.device)
        return
    expected = json.loads(asked.expected.read_text()) if asked.expected else {}
    written = {name: check(name, asked, expected) for name in asked.only}
    if asked.write:
        asked.write.write_text(json.dumps(written))


if __name__ == "__main__":
    main()
