"""Seconds from starting Python to the first token, on an empty cache and on a warm one, by stages."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import workloads

RESULTS = Path(__file__).resolve().parent / "results"
COMPILERS = ("torch._dynamo", "torch._inductor", "sympy")  # what a warm start has no use for


def main() -> None:
    """Start each shape once cold and then warm, each time in a new process; print a line each, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=["1b", "8b"])
    parser.add_argument("--warm", type=int, default=3, help="warm starts; the median is what counts")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_start.json")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(start(options.shapes[0], options.child)))
        return
    document: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "shapes": {}}
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as cache:
            starts = [in_new_process(shape, cache) for _ in range(1 + options.warm)]
        document["shapes"][shape] = {"cold": starts[0], "warm": starts[1:]}
        for name, facts in zip(["cold", *["warm"] * options.warm], starts, strict=True):
            print(shape, name, json.dumps({k: v for k, v in facts.items() if k != "card"}), flush=True)
        document |= {"card": starts[0]["card"], "torch": starts[0]["torch"]}
        options.output.write_text(json.dumps(document, indent=1) + "\n")


def in_new_process(shape: str, cache: str) -> dict[str, Any]:
    """What a new process says of its start, with the time that passed outside of it as well."""
    started = time.perf_counter()
    child = subprocess.run(
        [sys.executable, __file__, shape, "--child", cache], stdout=subprocess.PIPE, text=True, check=True
    )
    facts: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return {"process_s": round(time.perf_counter() - started, 2), **facts}


def start(shape: str, cache: Path) -> dict[str, Any]:
    """Import, load with random weights, answer one prompt; the seconds of each."""
    begun = time.perf_counter()
    import torch

    from lamina import Runtime, SamplingParams

    imported = time.perf_counter()
    folder = workloads.write_config(shape, cache / "shape")
    settings: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "device": "cuda"}
    limits: dict[str, Any] = {"memory_fraction": 0.85, "max_model_len": 16384, "max_num_seqs": 256}
    with Runtime.from_pretrained(folder, **settings, **limits, cache_dir=cache) as runtime:
        loaded = time.perf_counter()
        params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
        runtime.generate(workloads.prompts(1, 128, 9), params)
        answered = time.perf_counter()
        startup = runtime.stats()["startup"]
        overlapped = startup.pop("overlapped")
        stages = {name: round(seconds, 2) for name, seconds in startup.items() if seconds}
    return {
        "import_s": round(imported - begun, 2),
        "load_s": round(loaded - imported, 2),
        "first_token_s": round(answered - loaded, 3),
        "stages": stages,
        "overlapped": {name: round(seconds, 2) for name, seconds in overlapped.items()},
        "compilers_imported": [name for name in COMPILERS if name in sys.modules],
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
