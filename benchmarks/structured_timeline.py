"""Where the time of steps with constrained rows goes: the host's parts of a step, and when the GPU waits.

Answers of a full batch under torch's profiler, with every row constrained and with none. A step's forward is
launched before the tokens of the one before are read, and its samples before the next one's forward, so the
host's parts may take as long as the forward pass; where they take longer the GPU is idle, and what the host
does meanwhile is what it waits for.
"""

import argparse
import itertools
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import structured_rates
import torch
import workloads
from torch.profiler import ProfilerActivity, profile, record_function

from lamina import Runtime
from lamina.runtime.engine.engine_core import EngineCore
from lamina.runtime.engine.output_processor import OutputProcessor
from lamina.runtime.scheduler.scheduler import Scheduler
from lamina.runtime.worker.grammar_masks import GrammarMasks
from lamina.runtime.worker.graph_runner import GraphRunner
from lamina.runtime.worker.input_batch import InputBatch
from lamina.runtime.worker.launched_step import LaunchedStep
from lamina.runtime.worker.logits_adjuster import Adjuster

RESULTS = Path(__file__).resolve().parent / "results" / "structured_timeline.json"
PARTS: dict[str, tuple[type, str]] = {
    "step": (EngineCore, "_step"),  # what no part below has
    "schedule": (Scheduler, "schedule"),
    "write": (InputBatch, "write"),
    "replay": (GraphRunner, "replay_decode"),
    "begin": (Adjuster, "begin"),
    "move": (GrammarMasks, "begin"),
    "wake": (GrammarMasks, "_start"),  # the thread that makes masks, where it does
    "adjust": (Adjuster, "finish"),
    "masks": (GrammarMasks, "finish"),
    "fill": (GrammarMasks, "_fill"),  # and the wait for that thread
    "wait for tokens": (LaunchedStep, "token_ids"),
    "read": (LaunchedStep, "read"),
    "take in": (EngineCore, "_take_in"),
    "text": (OutputProcessor, "process"),
}
GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
Span = tuple[float, float, str]  # from, to, what; microseconds


def main() -> None:
    """Print a table a case, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8b", choices=workloads.SHAPES)
    parser.add_argument("--batches", type=int, nargs="*", default=[64])
    parser.add_argument("--model", type=Path, help="a checkpoint in place of random weights")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jump-forward", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--cache-dir")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    for label, (kind, name) in PARTS.items():
        _annotate(kind, name, label)
    document: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "shape": options.shape, "cases": {}}
    with (
        tempfile.TemporaryDirectory() as folder,
        structured_rates._open(options, Path(folder)) as runtime,
    ):
        for batch in options.batches:
            for count in (batch, 0):
                found = timeline(runtime, batch, count, Path(folder) / "trace.json")
                document["cases"][f"{count} of {batch} constrained"] = found
                print(f"{count} of {batch} constrained:\n{json.dumps(found, indent=1)}", flush=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")


def timeline(runtime: Runtime, batch: int, num_constrained: int, trace: Path) -> dict[str, Any]:
    """Milliseconds a step: of the whole, of each part of the host's without its own parts, of an idle GPU."""
    size = runtime.tokenizer.size
    drawn = workloads.prompts(batch, structured_rates.PROMPT, batch)
    prompts = [[id_ % size for id_ in prompt] for prompt in drawn]
    for seed in range(2):  # the first compiles the form, and makes what is made at first use
        structured_rates._rate(runtime, prompts, num_constrained, seed=seed)
    rate = structured_rates._rate(runtime, prompts, num_constrained, seed=2)
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with profile(activities=activities) as profiled:
        structured_rates._rate(runtime, prompts, num_constrained, seed=2)
    profiled.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    host = sorted(_spans(events, {"user_annotation"}, PARTS))
    busy = _merged(_spans(events, GPU))
    num_steps = sum(what == "step" for _, _, what in host)
    segments = _segments(host)
    own, idle = _sums(segments), _sums(_idle(segments, busy))
    return {
        "ms a step, not profiled": round(1000 * batch / rate, 3),
        "steps": num_steps,
        "host, ms a step": {name: round(each / 1000 / num_steps, 3) for name, each in own.most_common()},
        "GPU busy, ms a step": round(sum(end - start for start, end, _ in busy) / 1000 / num_steps, 3),
        "GPU idle, ms a step, by what the host did": {
            name: round(each / 1000 / num_steps, 3) for name, each in idle.most_common()
        },
    }


def _annotate(kind: type, name: str, label: str) -> None:
    method = getattr(kind, name)

    def annotated(*args: Any, **settings: Any) -> Any:
        with record_function(label):
            return method(*args, **settings)

    setattr(kind, name, annotated)


def _spans(events: list[Any], kinds: set[str], names: Iterable[str] | None = None) -> list[Span]:
    found = [event for event in events if event.get("ph") == "X" and event.get("cat") in kinds]
    named = [event for event in found if names is None or event["name"] in names]
    return [(event["ts"], event["ts"] + event["dur"], event["name"]) for event in named]


def _merged(spans: list[Span]) -> list[Span]:
    """The same times without overlaps, in order."""
    merged: list[Span] = []
    for start, end, what in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]), what)
        else:
            merged.append((start, end, what))
    return merged


def _segments(host: list[Span]) -> list[Span]:
    """What the host does, one thing at a time: of nested parts the innermost, between steps the client."""
    marks = [(start, 1, end, what) for start, end, what in host] + [
        (end, 0, 0.0, what) for _, end, what in host
    ]
    segments: list[Span] = []
    within, since = ["the client"], host[0][0]
    for time_, opens, _, what in sorted(marks, key=lambda mark: (mark[0], mark[1], -mark[2])):
        segments.append((since, time_, within[-1]))
        since = time_
        if opens:
            within.append(what)
        else:
            within.pop()
    return segments


def _sums(segments: list[Span]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for start, end, what in segments:
        sums[what] += end - start
    return sums


def _idle(segments: list[Span], busy: list[Span]) -> list[Span]:
    """The parts of what the host does in which the GPU does nothing."""
    gaps = [(end, start) for (_, end, _), (start, _, _) in itertools.pairwise(busy)]
    idle, place = [], 0
    for start, end, what in segments:
        while place < len(gaps) and gaps[place][1] <= start:
            place += 1
        for from_, to in gaps[place:]:
            if from_ >= end:
                break
            idle.append((max(start, from_), min(end, to), what))
    return idle


if __name__ == "__main__":
    main()
