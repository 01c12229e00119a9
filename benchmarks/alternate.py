"""Two trees of this project against each other: the same answers asked of both, turn by turn, in one run.

Each tree serves each shape in a process of its own, all of them started before anything is timed; a round
asks every pair the same, and the tree that is asked first changes from round to round. What counts is the
ratio of each pair: a machine that slows down slows both. It prints in how many rounds both gave the same ids:
in all of them, unless the trees multiply by different kernels.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import workloads

HERE = Path(__file__).resolve()
RESULTS = HERE.parent / "results" / "alternate.json"
PROMPT, DECODED = 128, 128
TINY = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 32000}
TINY_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True}


def main() -> None:
    """Print a line a case, old over new, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path, help="the folder of a tree")
    parser.add_argument("new", type=Path)
    parser.add_argument("--shapes", nargs="*", default=["1b", "8b"], help="or .gguf files of 32,000 tokens")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 32, 128])
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cache-dir", default="/tmp/lamina-alternate")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--serve", metavar="SHAPE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options)
    document: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "rounds": options.rounds, "shapes": {}}
    for shape in options.shapes:
        pair = {name: Served(getattr(options, name), shape, options) for name in ("old", "new")}
        document["machine"] = pair["new"].machine
        starts = {name: served.start_seconds for name, served in pair.items()}
        captured = {
            name: served.num_captured for name, served in pair.items()
        }  # by a measurement at the start
        print(shape, "start", starts, "graphs", captured, flush=True)
        document["shapes"][shape] = {"start_s": starts, "graphs": captured} | compare(shape, pair, options)
        for served in pair.values():
            served.close()
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    return None


class Served:
    """A shape served by a tree in another process."""

    def __init__(self, tree: Path, shape: str, options: argparse.Namespace) -> None:
        given = "--device", options.device, "--cache-dir", options.cache_dir
        self._process = subprocess.Popen(
            [sys.executable, str(HERE), str(tree), str(tree), "--serve", shape, *given],
            env=os.environ | {"PYTHONPATH": f"{tree.resolve()}/src:{os.environ.get('EXTRA_PATH', '')}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        first = self._read()
        self.machine, self.start_seconds = first["machine"], first["start_s"]
        self.num_captured = first["graphs"]

    def ask(self, case: dict[str, int]) -> dict[str, Any]:
        """Seconds of a case, and a digest of the ids answered."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait() == 0

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)  # type: ignore[no-any-return]
        raise SystemExit(f"a tree ended with {self._process.wait()}")


def compare(shape: str, pair: dict[str, Served], options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of both trees and the median of the ratios, for each case."""
    cases = {f"decode batch {n}": {"batch": n, "prompt": PROMPT, "decoded": DECODED} for n in options.batches}
    cases |= {f"first token of {options.prefill}": {"batch": 1, "prompt": options.prefill, "decoded": 0}}
    found = {}
    for name, case in cases.items():
        rounds = [one_round(pair, case | {"seed": number}, number) for number in range(options.rounds + 1)]
        times = {
            tree: [each[tree]["seconds"] * 1e3 for each in rounds[1:]] for tree in pair
        }  # after a warm-up
        ratio = statistics.median(new / old for old, new in zip(times["old"], times["new"], strict=True))
        same = statistics.mean(each["old"]["ids"] == each["new"]["ids"] for each in rounds)
        found[name] = {"new_over_old": ratio, "same_ids": same}
        found[name] |= {f"{tree}_ms": statistics.median(ms) for tree, ms in times.items()}
        print(shape, name, {k: round(v, 4) for k, v in found[name].items()}, flush=True)
    return found


def one_round(pair: dict[str, Served], case: dict[str, int], number: int) -> dict[str, dict[str, Any]]:
    """What each tree answers to one question to both."""
    return {name: pair[name].ask(case) for name in (("old", "new") if number % 2 else ("new", "old"))}


def serve(options: argparse.Namespace) -> None:
    """Load a shape and answer cases, a line each, until there are no more."""
    import lamina

    tree = str(options.old.resolve())
    assert Path(lamina.__file__).resolve().is_relative_to(tree), f"{lamina.__file__} is not of {tree}"
    workloads.SHAPES["tiny"] = TINY | TINY_HEADS
    is_file = options.serve.endswith(".gguf")
    folder = Path("/tmp/lamina-shapes") / options.serve
    model = Path(options.serve) if is_file else workloads.write_config(options.serve, folder)
    started = time.perf_counter()
    with lamina.Runtime.from_pretrained(
        model,
        load_format="auto" if is_file else "dummy",
        device=options.device,
        cache_dir=options.cache_dir,
        max_model_len=8192,
        num_kv_blocks=4096 if options.device == "cuda" else 256,
        max_num_seqs=256,
    ) as runtime:
        first = {"start_s": time.perf_counter() - started, "machine": describe()}
        graphs = len(runtime.stats()["cuda_graphs"].get("sizes", ()))
        print(json.dumps(first | {"graphs": graphs}), flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(runtime, **json.loads(line))), flush=True)


def describe() -> dict[str, str]:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": name, "torch": torch.__version__}


def answer(runtime: Any, *, batch: int, prompt: int, decoded: int, seed: int) -> dict[str, Any]:
    """Seconds of a decode step, or to the first token where none is decoded."""
    from lamina import SamplingParams

    def timed(length: int, seed: int) -> tuple[float, list[tuple[int, ...]]]:
        params = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0, detokenize=False)
        asked = [[1000 + each % 20000 for each in ids] for ids in workloads.prompts(batch, prompt, seed)]
        started = time.perf_counter()
        outputs = runtime.generate(asked, params)
        seconds = time.perf_counter() - started
        return seconds, [output.outputs[0].token_ids for output in outputs]

    short, ids = timed(1, 2 * seed)
    if decoded:
        long, ids = timed(1 + decoded, 2 * seed + 1)
        short = (long - short) / decoded
    return {"seconds": short, "ids": hash(tuple(ids))}  # of ints alone, so it is the same in every process


if __name__ == "__main__":
    main()
