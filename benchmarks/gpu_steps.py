"""Where a decode step's time goes on one GPU: every kernel of a replayed CUDA graph, and what it adds.

A step is as long as its kernels add to it: from when all before one have ended to its own end. That counts
gaps, and of kernels that start early (PDL) only what is not hidden; the sum is the step.
"""

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import workloads
from gpu import describe_machine
from torch.profiler import ProfilerActivity, profile

from lamina import CompileConfig, Runtime
from lamina.runtime.protocol.scheduler_output import no_requests
from lamina.runtime.worker.graph_runner import Decode, PlannedCaptures

RESULT = Path(__file__).resolve().parent / "results" / "gpu_steps.json"
BLOCK_SIZE, PROFILED = 64, 10
Event: Any = torch.cuda.Event


def main() -> None:
    """Print a table for each shape and batch, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["1b", "8b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128, 256])
    parser.add_argument("--context", type=int, default=192, help="tokens of each request")
    parser.add_argument("--max-model-len", type=int, default=16384, help="what block tables have room for")
    parser.add_argument("--quantization", help="as the setting of that name")
    parser.add_argument("--cache-dir")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    document: dict[str, Any] = {"machine": describe_machine(), "shapes": {}}
    for shape in options.shapes:
        sizes = max(options.batches), options.context, options.max_model_len
        with load(shape, options.cache_dir, *sizes, options.quantization) as runtime:
            found = document["shapes"][shape] = {}
            for batch in options.batches:
                found[batch] = look_at(DecodeStep(runtime, batch, options.context), shape)
                options.output.write_text(json.dumps(document, indent=1) + "\n")


def load(
    shape: str,
    cache_dir: str | None,
    max_num_seqs: int,
    context: int,
    max_model_len: int = 16384,
    quantization: str | None = None,
) -> Runtime:
    """A shape with random weights, and nothing captured yet."""
    folder = workloads.write_config(shape, Path("/tmp/lamina-shapes") / shape)
    blocks_each = -(-context // BLOCK_SIZE)
    runtime = Runtime.from_pretrained(
        folder,
        load_format="dummy",
        dtype="bfloat16",
        device="cuda",
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        num_kv_blocks=max(1024, max_num_seqs * blocks_each + 16),
        block_size=BLOCK_SIZE,
        quantization=quantization,
        compile=CompileConfig(cuda_graphs="lazy"),
        cache_dir=cache_dir,
    )
    with torch.inference_mode():
        for cache in runtime._loaded.runner._attention._caches:
            for values in cache:
                values.normal_()
    return runtime


class DecodeStep:
    """A captured step of so many requests, one token each, that can be replayed at will."""

    def __init__(self, runtime: Runtime, batch: int, context: int) -> None:
        self.runtime, self.batch, self.context = runtime, batch, context
        self.capture()

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture it anew, by the kernels that are chosen now."""
        runner = self.runtime._loaded.runner
        runner.drop_captures()
        graphs = runner._graphs
        graphs._to_capture.clear()
        runner.plan_captures(PlannedCaptures([Decode(self.batch)]))
        assert runner.capture_next()
        self._replay = graphs._cuda_graphs._captures[Decode(self.batch)].replay
        self._fill(runner._input_batch)
        self._replay()
        torch.cuda.synchronize()

    def _fill(self, inputs: Any) -> None:
        """Requests of `context` tokens with blocks of their own, in place of padding."""
        batch, used = self.batch, -(-self.context // BLOCK_SIZE)
        view = inputs.write(no_requests(), batch, batch, batch)
        device = view.seq_lens.device
        rows = torch.arange(batch + 1, dtype=torch.int32, device=device)
        blocks = 1 + torch.arange(batch * used, dtype=torch.int32, device=device).view(batch, used)
        view.block_tables[0][:, :used] = blocks
        view.slot_mappings[0].copy_(blocks[:, -1] * BLOCK_SIZE + (self.context - 1) % BLOCK_SIZE)
        view.positions.fill_(self.context - 1)
        view.seq_lens.fill_(self.context)
        view.query_start_loc.copy_(rows)
        view.logits_rows.copy_(rows[:-1])
        start = inputs._first_packed  # where token sources point
        token_ids = torch.randint(inputs.vocab_size, (batch,), device=device)
        inputs._memory[start : start + batch] = token_ids.int()

    def milliseconds(self, replays: int = 20, repeats: int = 5) -> list[float]:
        """What a step takes of many that follow each other, a number a repeat."""
        taken = []
        for _ in range(repeats + 1):
            start, end = (Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(replays):
                self._replay()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / replays)
        return taken[1:]

    def profiled(self) -> list[list["Ran"]]:
        """Every kernel and copy of some steps but the first, in order."""
        return profiled(self._replay)


class Ran(NamedTuple):
    """A kernel's run, in microseconds."""

    name: str
    start: float
    end: float


def profiled(replay: Callable[[], object]) -> list[list[Ran]]:
    """Every kernel and copy of some replays but the first, in order."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED):
            replay()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    spans = [event for event in found.events() if event.device_type == on_device]
    ran = [Ran(span.name, span.time_range.start, span.time_range.end) for span in spans]
    ran.sort(key=lambda each: each.start)
    each = len(ran) // PROFILED
    return [ran[i : i + each] for i in range(each, each * PROFILED, each)]


def look_at(step: DecodeStep, shape: str) -> dict[str, Any]:
    """Milliseconds of a step, alone and profiled, and a line for each kernel."""
    alone = statistics.median(step.milliseconds())
    steps = step.profiled()
    lines = table(steps)
    in_profile = sum(line["adds_us"] for line in lines) / 1e3
    took = f"{alone:.3f} ms a step, {in_profile:.3f} profiled, {len(steps[0])} kernels"
    print(f"\n{shape} batch {step.batch}: {took}")
    show(lines)
    return {"ms": alone, "profiled_ms": in_profile, "kernels": lines}


def show(lines: list[dict[str, Any]]) -> None:
    """Print a table, the most first."""
    print(f"{'adds us':>9} {'runs us':>9} {'times':>5} {'adds each':>9} {'runs each':>9}  kernel")
    for line in lines:
        adds, runs, times = line["adds_us"], line["runs_us"], line["times"]
        figures = f"{adds:9.1f} {runs:9.1f} {times:5} {adds / times:9.2f} {runs / times:9.2f}"
        print(f"{figures}  {line['kernel']}", flush=True)


def table(steps: list[list[Ran]]) -> list[dict[str, Any]]:
    """What each place in a step adds and takes, medians of the steps; a line a kernel and the one before."""
    sums: dict[str, list[float]] = {}
    places = zip(*(list(added(step)) for step in steps), strict=True)
    before = "start"
    for place in places:
        name = short(place[0][0].name)
        line = sums.setdefault(f"{name} after {before.split('<')[0]}", [0.0, 0.0, 0])
        line[0] += statistics.median(adds for _, adds in place)
        line[1] += statistics.median(ran.end - ran.start for ran, _ in place)
        line[2] += 1
        before = name
    lines = [{"kernel": k, "adds_us": a, "runs_us": r, "times": int(n)} for k, (a, r, n) in sums.items()]
    return sorted(lines, key=lambda line: -line["adds_us"])


def added(step: list[Ran]) -> Iterable[tuple[Ran, float]]:
    """By how much each kernel makes the step longer."""
    ended = step[0].start
    for ran in step:
        yield ran, max(0.0, ran.end - ended)
        ended = max(ended, ran.end)


def short(name: str) -> str:
    """A kernel's name without namespaces and types that say little."""
    name = re.sub(r"lamina::|at::native::|__nv_|\(anonymous namespace\)::", "", name.removeprefix("void "))
    return re.sub(r"\(.*", "", name)[:90]


if __name__ == "__main__":
    main()
