"""Sums over GPUs, in CUDA graphs: kernels that read peers' memory beside NCCL, in microseconds of a call.

Starts a process for each GPU. Every way is checked against the sum in the order of ranks before it is timed.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lamina.custom_ops import add_rms_norm
from lamina.custom_ops._shared.registry import select
from lamina.custom_ops.all_reduce.cuda_group import CudaGroup
from lamina.custom_ops.all_reduce.gloo_group import GlooGroup
from lamina.custom_ops.all_reduce.group import set_group, sum_in_rank_order
from lamina.custom_ops.all_reduce.peers import MAX_BYTES, ONE_SHOT_BYTES, PACKET_BYTES

RESULTS = Path(__file__).resolve().parent / "results"
SIZES = [8 << 10 << power for power in range(10)]  # bytes, to 4 MiB
BEYOND = [8 << 20, 32 << 20]  # NCCL's alone
HIDDEN, DTYPE, EPS = 4096, torch.bfloat16, 1e-5
NUM_CALLS = 40  # in a graph
Run = Callable[[], Any]


def main() -> None:
    """Measure on all GPUs, or as many as asked for, print a line a size, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--rounds", type=int, default=30, help="replays of each graph")
    parser.add_argument("--output", type=Path, help="default: results/all_reduce_h200_x<ranks>.json")
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error(f"{options.ranks} GPUs; wanted at least 2")
    output = options.output or RESULTS / f"all_reduce_h200_x{options.ranks}.json"
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        given = [(meeting, rank, options.ranks, options.rounds, output) for rank in range(options.ranks)]
        processes = [context.Process(target=run_rank, args=own) for own in given]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a rank failed")


def run_rank(meeting: str, rank: int, size: int, rounds: int, output: Path) -> None:
    """One process's part; rank 0 reports."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    group = CudaGroup(GlooGroup(meeting, rank=rank, size=size), device)
    set_group(group)
    cases = []
    for num_bytes in [*SIZES, *BEYOND]:
        case = {"bytes": num_bytes, "microseconds": measure(group, device, num_bytes, rounds)}
        cases.append(case)
        if rank == 0:
            print(f"{num_bytes >> 10:6} KiB  {case['microseconds']}", flush=True)
    if rank == 0:
        facts = {"gpu": torch.cuda.get_device_name(), "ranks": size, "torch": torch.__version__}
        facts |= {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "date": time.strftime("%Y-%m-%d")}
        facts |= {"kernels": group.peers is not None, "one_shot_bytes": ONE_SHOT_BYTES[size]}
        facts |= {"packet_bytes": PACKET_BYTES}
        output.write_text(json.dumps({**facts, "cases": cases}, indent=1) + "\n")
    set_group(None)
    group.close()


def measure(group: CudaGroup, device: torch.device, num_bytes: int, rounds: int) -> dict[str, float]:
    """Median microseconds of a call, by way; the slowest rank's."""
    xs = [drawn(rank, num_bytes, device) for rank in range(group.size)]
    residual, weight = drawn(98, num_bytes, device), drawn(99, HIDDEN * 2, device).view(-1)
    total, found = sum_in_rank_order(xs), {}
    for way, run in contenders(group, xs[group.rank], residual, weight).items():
        check(run(), total, residual, weight)
        found[way] = slowest(group, microseconds(group, run, rounds))
    return found


def contenders(group: CudaGroup, x: Tensor, residual: Tensor, weight: Tensor) -> dict[str, Run]:
    """Calls of every way to sum x, by name."""

    def provider(name: str, op: str = "all_reduce") -> Callable[..., Any]:
        return select(op, device=x.device, dtype=DTYPE, provider=name).call

    nccl, size = provider("group"), group.size
    found: dict[str, Run] = {
        "NCCL": lambda: nccl(x, size),
        "NCCL, then norm": lambda: add_rms_norm(nccl(x, size), residual, weight, EPS),
    }
    if group.peers is None or x.numel() * x.element_size() > MAX_BYTES:
        return found
    one, two, norm = (
        provider("one_shot"),
        provider("two_shot"),
        provider("one_shot", "all_reduce_add_rms_norm"),
    )
    ways: dict[str, Run] = {
        "one-shot": lambda: one(x, size),
        "two-shot": lambda: two(x, size),
        "one-shot and norm": lambda: norm(x, residual, weight, EPS, size, False),
    }
    if x.numel() * x.element_size() <= PACKET_BYTES:
        for way in ("one-shot", "one-shot and norm"):
            ways[f"{way}, no packets"] = without_packets(group, ways[way])
    return {**ways, **found}


def without_packets(group: CudaGroup, run: Run) -> Run:
    """The call, by kernels in which ranks meet and read, as for larger tensors."""

    def run_so() -> Any:
        peers = group.peers
        assert peers is not None
        try:
            group.peers = replace(peers, packet_bytes=0)
            return run()
        finally:
            group.peers = peers

    return run_so


def drawn(seed: int, num_bytes: int, device: torch.device) -> Tensor:
    """The same on every GPU: drawn on the host."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_bytes // (2 * HIDDEN), HIDDEN, generator=generator).to(device, DTYPE)


def check(result: Any, total: Tensor, residual: Tensor, weight: Tensor) -> None:
    """The result of a call has the bits that every rank must get."""
    if isinstance(result, Tensor):
        assert torch.equal(result, total)
        return
    wanted = add_rms_norm(total, residual, weight, EPS)
    assert all(torch.equal(*pair) for pair in zip(result, wanted, strict=True))


def microseconds(group: CudaGroup, run: Run, rounds: int) -> float:
    """Of a call, the median over replays of a graph of many."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(NUM_CALLS):
            run()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        group.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # so that no rank waits for another's host while it is timed
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / NUM_CALLS)
    return statistics.median(times)


def slowest(group: CudaGroup, time_us: float) -> float:
    """The largest of all ranks' times, in microseconds."""
    return round(float(group.all_gather(torch.tensor([time_us]), 0).max()), 2)


if __name__ == "__main__":
    main()
