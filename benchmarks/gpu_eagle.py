"""What an EAGLE head costs and gains on one GPU: tokens a second by scripted acceptance, beside without.

Weights are random, those of a head of the published shape too: it drafts in every step, and whether a draft
holds is drawn for its row and position instead, as gpu_speculation.py has it.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import workloads
from gpu import describe_machine
from gpu_speculation import MAX_MODEL_LEN, compare, hold_by_lot

from lamina import Eagle, Runtime
from lamina.runtime.worker.speculator import Speculator

RESULT = Path(__file__).resolve().parent / "results" / "gpu_eagle.json"
WANTED = {1: 1.7, 8: 1.5, 32: 1.2}
DRAFTED = 32000  # ids that published heads of EAGLE-3 draft


def main() -> None:
    """Print a line a batch, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", nargs="?", default="8b")
    parser.add_argument("--head", choices=("eagle-1", "eagle-3"), default="eagle-3")
    parser.add_argument("--batches", type=int, nargs="+", default=list(WANTED))
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.7, help="of drafts that hold")
    parser.add_argument("--tokens", type=int, default=384, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cache-dir")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    Speculator._judge = hold_by_lot(options.share)  # type: ignore[method-assign]
    document: dict[str, Any] = {
        "machine": describe_machine(),
        **{name: getattr(options, name) for name in ("head", "k", "share")},
    }
    plain, drafting = (open_runtime(options, drafts=drafts) for drafts in (False, True))
    with plain, drafting:
        for batch in options.batches:
            found = document[f"batch {batch}"] = compare(plain, drafting, batch, options)
            print(f"batch {batch}: {json.dumps(found)}; wanted {WANTED.get(batch)}", flush=True)
            options.output.write_text(json.dumps(document, indent=1) + "\n")


def open_runtime(options: argparse.Namespace, *, drafts: bool) -> Runtime:
    """A shape with random weights, alone or with a head."""
    root = Path("/tmp/lamina-shapes")
    folder, head = workloads.write_config(options.shape, root / options.shape), root / options.head
    write_head(json.loads((folder / "config.json").read_text()), head)
    most = max(options.batches)
    started = time.perf_counter()
    runtime = Runtime.from_pretrained(
        folder,
        load_format="dummy",
        dtype="bfloat16",
        device=options.device,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=most,
        num_kv_blocks=most * 16 + 64,
        prefix_cache=False,
        speculative=Eagle(model=head, k=options.k) if drafts else None,
        cache_dir=options.cache_dir,
    )
    name = f"{options.head}, k {options.k}" if drafts else "plain"
    print(f"{name}: ready in {time.perf_counter() - started:.1f} s", flush=True)
    return runtime


def write_head(target: dict[str, Any], folder: Path) -> None:
    """A folder with the config.json that a published head for this target has."""
    config = target | {"num_hidden_layers": 1, "tie_word_embeddings": False}
    if folder.name == "eagle-3":
        config |= {"draft_vocab_size": DRAFTED}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
