"""What a decode step costs the host, phase by phase, with a model that computes nothing. No GPU is needed.

Many requests decode at once; every stage of a step runs as in serving, CUDA graphs included, but the forward
is a constant and the vocabulary tiny. Text is not part of it: requests ask for token ids.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lamina.cli.info import describe_machine
from lamina.compiler.execution.cuda_graphs import CudaGraphs
from lamina.runtime.engine.engine_core import EngineCore
from lamina.runtime.executor.uniproc import UniprocExecutor
from lamina.runtime.kv_cache.block_pool import BlockPool
from lamina.runtime.kv_cache.manager import KVCacheManager
from lamina.runtime.protocol.engine_request import EngineRequest
from lamina.runtime.sampling_params import SamplingParams
from lamina.runtime.scheduler.config import SchedulerConfig
from lamina.runtime.scheduler.scheduler import Scheduler
from lamina.runtime.worker.attention import AttentionBackend, PagedAttention
from lamina.runtime.worker.graph_runner import Decode, PlannedCaptures
from lamina.runtime.worker.input_batch import InputBatch
from lamina.runtime.worker.model_runner import ModelRunner

RESULTS = Path(__file__).resolve().parent / "results" / "host_step.json"
WAITING = (100, 1_000, 10_000, 100_000)
CONTEXT, PROMPT, VOCAB = 16384, 128, 8
TURN = 16  # tokens that prompts, and answers, differ by at most: not all need a block at once
PHASES = ("schedule", "write", "launch", "update")


def main() -> None:
    """Print microseconds a step for each number of requests, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("batches", nargs="*", type=int, default=[1, 32, 128, 256])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=1, help="of each case, of which the fastest counts")
    parser.add_argument("--block-sizes", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = {name: describe_machine()[name] for name in ("cpu", "cores", "python", "versions")}
    document: dict[str, Any] = {"steps": options.steps, "runs": options.runs, "machine": machine}
    for block_size in options.block_sizes:
        figures = document[f"blocks of {block_size}"] = {}
        for name, case in cases(options.batches).items():
            runs = [measure(options.steps, block_size, **case) for _ in range(options.runs)]
            figures[name] = min(runs, key=lambda run: run["scheduler"])
            print(f"blocks of {block_size}, {name}: {line(figures[name])}", flush=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")


def cases(batches: list[int]) -> dict[str, dict[str, Any]]:
    """What is measured, by name."""
    found: dict[str, dict[str, Any]] = {}
    for batch in batches:
        found[f"decode, {batch} requests"] = {"batch": batch, "turnover": False}
        found[f"turnover, {batch} requests"] = {"batch": batch, "turnover": True}
    for waiting in WAITING:
        found[f"turnover, 256 requests, {waiting} waiting"] = {
            "batch": 256,
            "turnover": True,
            "waiting": waiting,
        }
    # what ended requests have left in the prefix cache must make room, block by block
    found["turnover, 256 requests, 10000 waiting, cache full"] = {
        "batch": 256,
        "turnover": True,
        "waiting": 10_000,
        "tokens_each": 640,
    }
    return found


def line(figures: dict[str, float]) -> str:
    return "  ".join(f"{phase} {us:.0f}" for phase, us in figures.items()) + " us"


def measure(
    num_steps: int,
    block_size: int,
    *,
    batch: int,
    turnover: bool,
    waiting: int = 0,
    tokens_each: int = 4096,
) -> dict[str, float]:
    """Median microseconds of each phase of a step, of the whole, and of adding a request.

    "scheduler" is what the scheduler has of "schedule" and "update", which there is a mean of, too. With
    turnover, answers have as many tokens as there are requests, so that one ends in a step, both as a mean,
    and another takes its place. The cache holds `tokens_each` tokens for each of them.
    """
    engine, runner, input_batch = build(batch, block_size, tokens_each)
    spent: dict[str, list[float]] = {name: [] for name in ("step", *PHASES, "scheduler", "add")}
    for name, owner, method in (
        ("schedule", engine.scheduler, "schedule"),
        ("write", input_batch, "write"),
        ("launch", runner, "execute"),
        ("update", engine, "_take_in"),
        ("scheduler", engine.scheduler, "update"),
        ("step", engine, "step"),
        ("add", engine, "add"),
    ):
        setattr(owner, method, timed(getattr(owner, method), spent[name]))
    longest = PROMPT + TURN + num_steps + 64
    numbers = itertools.count()

    def fill_up() -> None:
        while engine.scheduler.num_running + engine.scheduler.num_waiting < batch + waiting:
            number = next(numbers)
            length = PROMPT + TURN + 1 + number * 194 % (2 * batch) if turnover else longest
            engine.add(request_for_ids(number, length))

    for _ in range(2 * batch if turnover else 32):
        fill_up()
        engine.step()
    for times in spent.values():
        times.clear()
    for _ in range(num_steps):
        fill_up()
        engine.step()
        engine.outputs.clear()
    spent["scheduler"] = list(map(sum, zip(spent["schedule"], spent["scheduler"], strict=True)))
    figures = {name: statistics.median(times) * 1e6 for name, times in spent.items() if times}
    figures["launch"] -= figures["write"]
    figures["scheduler mean"] = statistics.mean(spent["scheduler"]) * 1e6
    return {name: round(us, 1) for name, us in figures.items()}


def timed(action: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    """The same callable, which notes how long each call takes."""

    def call(*args: Any) -> Any:
        started = time.perf_counter()
        result = action(*args)
        times.append(time.perf_counter() - started)
        return result

    return call


def request_for_ids(number: int, length: int) -> EngineRequest:
    """A request for token ids alone, all at its end."""
    params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False).resolve(None, seed=0)
    return EngineRequest(
        request_id=str(number),
        # no two begin alike
        prompt_token_ids=(number % 2**31, *(1,) * (PROMPT - 1 + number % TURN)),
        params=params,
        max_total_tokens=length,
    )


def build(batch: int, block_size: int, tokens_each: int) -> tuple[EngineCore, ModelRunner, InputBatch]:
    """An engine whose model always says token 3."""
    device = torch.device("cpu")
    input_batch = InputBatch(
        max_num_seqs=batch,
        max_num_tokens=8192,
        max_blocks_per_seq=CONTEXT // block_size,
        block_size=block_size,
        vocab_size=VOCAB,
        device=device,
    )
    hidden, logits = torch.zeros(8192, 1), torch.zeros(batch, VOCAB)
    logits[:, 3] = 1.0

    def forward(token_ids: Tensor, positions: Tensor, attend: PagedAttention) -> Tensor:
        return hidden[: token_ids.shape[0]]

    runner = ModelRunner(
        forward=forward,
        logits=lambda hidden: logits[: hidden.shape[0]],
        attention=PagedAttention(no_backend(), [], []),
        input_batch=input_batch,
        num_valid_ids=VOCAB,
        cuda_graphs=CudaGraphs(device),
    )
    runner.plan_captures(PlannedCaptures([Decode(batch)]))
    runner.capture_next()
    kv_cache = KVCacheManager(BlockPool(batch * tokens_each // block_size), block_size, prefix_cache=True)
    limits = SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=8192, max_model_len=CONTEXT)
    return EngineCore(Scheduler(limits, kv_cache), UniprocExecutor(runner)), runner, input_batch


def no_backend() -> AttentionBackend:
    """For a model without attention."""
    calls = [name for name in AttentionBackend.__dataclass_fields__ if name not in ("name", "reason")]
    return AttentionBackend(name="none", reason="", **dict.fromkeys(calls, lambda *args: None))


if __name__ == "__main__":
    main()
