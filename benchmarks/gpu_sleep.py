"""Sleep and wake of a runtime on one GPU: seconds, memory given back, and the first token after it.

Every level is slept several times: the first sleep of level 1 also pins memory of the host, which is kept.
Exits with 1 where a sleep gave back less than 95 % of weights and cache or a later one took longer than its
bound, where a first token came later than its bound, or where weights or tokens changed.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import workloads
from made_up_weights import write_checkpoint

from lamina import CompileConfig, Runtime, SamplingParams

RESULTS = Path(__file__).resolve().parent / "results" / "gpu_sleep.json"
GIVEN_BACK, SLEEP_S, TOKEN_S = 0.95, 2.0, 3.0
PROMPTS = [[number % 1000 for number in one] for one in workloads.prompts(4, 100, 3)]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)


def main() -> None:
    """Print a line for each cycle, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="1b or 8b (their shapes, random weights), or a folder")
    parser.add_argument("--levels", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--cycles", type=int, default=3, help="of each level")
    parser.add_argument("--memory-fraction", type=float, default=0.85)
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoint of a shape is written, else removed"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cuda-graphs", default="auto", choices=["auto", "lazy", "on", "off"])
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        model = checkpoint_of(options.model, options.folder or Path(temporary))
        cycles = measure(model, options)
    document = {"date": time.strftime("%Y-%m-%d"), "settings": {k: str(v) for k, v in vars(options).items()}}
    options.output.write_text(json.dumps(document | {"cycles": cycles}, indent=1) + "\n")
    sys.exit(not all(one["is_right"] for one in cycles))


def checkpoint_of(model: str, folder: Path) -> Path:
    """A folder as it is; of a shape one with random weights, written unless it is there."""
    if model not in workloads.SHAPES:
        return Path(model)
    started, own = time.perf_counter(), folder / model
    if not (own / "model.safetensors.index.json").exists():
        write_checkpoint(workloads.write_config(model, own))
        print(f"checkpoint written in {time.perf_counter() - started:.1f} s", flush=True)
    return own


def measure(model: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every cycle of each level."""
    started = time.perf_counter()
    with Runtime.from_pretrained(
        model,
        dtype="bfloat16",
        device=options.device,
        max_model_len=4096,
        memory_fraction=options.memory_fraction,
        compile=CompileConfig(cuda_graphs=options.cuda_graphs),
        cache_dir=options.cache_dir,
    ) as runtime:
        print(f"opened in {time.perf_counter() - started:.1f} s", flush=True)
        first_token(runtime)  # so that all the answers find the prefix cache that they do after a wake
        before = tokens(runtime), sums(runtime)
        return [
            cycle(runtime, level, number, *before)
            for level in options.levels
            for number in range(options.cycles)
        ]


def cycle(
    runtime: Runtime, level: int, number: int, before: list[tuple[int, ...]], weights: list[float]
) -> dict[str, Any]:
    """One sleep, one wake, one token; then all the answers again."""
    total, full, times = runtime._loaded.runner._memory.num_bytes, used(), [time.perf_counter()]
    runtime.sleep(level)
    times.append(time.perf_counter())
    given_back = (full - used()) / total
    times.append(time.perf_counter())
    runtime.wake()
    times.append(time.perf_counter())
    times.append(first_token(runtime))
    found = {
        "level": level,
        "cycle": number,
        "gigabytes": total / 1e9,
        "given_back": given_back,
        "sleep_s": times[1] - times[0],
        "wake_s": times[3] - times[2],
        "wake_to_token_s": times[4] - times[2],
        "changed_weights": sum(one != other for one, other in zip(sums(runtime), weights, strict=True)),
        "is_same": tokens(runtime) == before,
    }
    is_fast = found["sleep_s"] <= SLEEP_S or number == 0
    is_small = not torch.cuda.is_available() or given_back >= GIVEN_BACK
    is_equal = found["is_same"] and not found["changed_weights"]
    found["is_right"] = is_equal and is_fast and is_small and found["wake_to_token_s"] <= TOKEN_S
    print({key: round(v, 3) if isinstance(v, float) else v for key, v in found.items()}, flush=True)
    return found


def first_token(runtime: Runtime) -> float:
    """When the first token of the first prompt came."""
    stream = runtime.stream(PROMPTS[0], GREEDY)
    next(stream)
    came = time.perf_counter()
    stream.close()
    return came


def tokens(runtime: Runtime) -> list[tuple[int, ...]]:
    """Of greedy answers to all the prompts."""
    return [output.outputs[0].token_ids for output in runtime.generate(PROMPTS, GREEDY)]


def sums(runtime: Runtime) -> list[float]:
    """A sum of each tensor of the weights, of whose numbers each counts by its place."""
    found = []
    for tensor in runtime._loaded.runner._memory.weights[0].weights.by_name.values():
        flat, place = tensor.view(-1), torch.arange(1 << 20, device=tensor.device) % 1021 + 1.0
        found.append(sum(float(part.double() @ place[: len(part)].double()) for part in flat.split(1 << 20)))
    return found


def used() -> int:
    """Bytes of the GPU that anybody uses; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


if __name__ == "__main__":
    main()
