"""Where a decode step's time goes over several GPUs: every kernel of each rank, and what it adds.

Steps are those of a running engine, as torch's profiler sees them: what kernels of a rank do not fill of a
step is printed apart, since ranks wait for each other within kernels and for the host between steps.
"""

import argparse
import json
import statistics
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import workloads
from gpu import describe_machine
from gpu_steps import Ran, show, table

import lamina
from lamina import Runtime, SamplingParams

RESULT = Path(__file__).resolve().parent / "results" / "rank_steps.json"
PROMPT, DECODED = 160, 48
ENDS_A_STEP = "DtoH"  # in the name of the copy of what was chosen
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


def main() -> None:
    """Print a table for each batch and rank, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", nargs="?", default="8b", choices=workloads.SHAPES)
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--quantization", help="as the setting of that name")
    parser.add_argument("--ranks", nargs="*", type=int, default=[0], help="whose tables are printed")
    parser.add_argument("--cache-dir")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    document: dict[str, Any] = {"machine": describe_machine(), "settings": {**vars(options), "output": None}}
    with Runtime.from_pretrained(
        workloads.write_config(options.shape, Path("/tmp/lamina-shapes") / options.shape),
        load_format="dummy",
        dtype="bfloat16",
        device="cuda",
        max_model_len=16384,
        max_num_seqs=256,
        quantization=options.quantization,
        tensor_parallel=options.tensor_parallel,
        pipeline_parallel=options.pipeline_parallel,
        cache_dir=options.cache_dir,
    ) as runtime:
        for batch in options.batches:
            document[str(batch)] = look_at(runtime, batch, options.ranks)
            options.output.write_text(json.dumps(document, indent=1) + "\n")


def look_at(runtime: Runtime, batch: int, ranks: list[int]) -> dict[int, Any]:
    """Milliseconds between the ends of steps, and a line for each kernel, of these ranks."""
    params = SamplingParams(max_tokens=DECODED, temperature=0.0, ignore_eos=True, detokenize=False)
    prompts = workloads.prompts(batch, PROMPT, seed=batch)
    runtime.generate(prompts, params)
    found: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        with lamina.profile(runtime, folder):
            runtime.generate(prompts, params)
        for rank in ranks:
            steps = steps_of(Path(folder) / f"rank{rank}.json")
            lines = table(steps)
            between = statistics.median(b[-1].end - a[-1].end for a, b in pairwise(steps))
            filled = sum(line["adds_us"] for line in lines)
            print(f"\nbatch {batch}, rank {rank}: {between:.0f} us a step, {filled:.0f} of these in kernels")
            show(lines)
            found[rank] = {"us": between, "in_kernels_us": filled, "kernels": lines}
    return found


def steps_of(trace: Path) -> list[list[Ran]]:
    """The decode steps of a trace that have as many kernels as most have."""
    events = json.loads(trace.read_text())["traceEvents"]
    ran = [
        Ran(event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in ON_DEVICE
    ]
    ran.sort(key=lambda each: each.start)
    steps: list[list[Ran]] = [[]]
    for each in ran:
        steps[-1].append(each)
        if ENDS_A_STEP in each.name:
            steps.append([])
    usual = Counter(map(len, steps[:-1])).most_common(1)[0][0]
    return [step for step in steps if len(step) == usual]


if __name__ == "__main__":
    main()
