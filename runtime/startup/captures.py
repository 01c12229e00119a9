"""Which sizes of steps are captured as CUDA graphs when a runtime starts, and their capture."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from ...common.progress import Progress
from ...compiler.execution.cuda_graphs import CudaGraphs
from ..config import RuntimeConfig
from ..speculation.config import draft_lengths
from ..worker.graph_runner import Decode
from ..worker.model_runner import ModelRunner
from .resolve import least_of_ranks
from .resolved import ResolvedRuntime

DECODE_SIZES = (1, 2, 4, *range(8, 257, 8))
MIXED_SIZES = (16, 32, 64, 128, 256, 512)
# Beyond, calling the pieces costs no padding: sizes are captured while the host is slower, or nearly so.
LARGE_MIXED_SIZES = (768, 1024, 1280, 1536, 1792, 2048)
FEWEST_GREEDY = 8  # samples of steps that are captured without gathering logits; fewer are gathered as soon
NEARLY_BOUND = 1.25  # how much longer than the host the GPU may take


def new_cuda_graphs(resolved: ResolvedRuntime) -> CudaGraphs | None:
    """An empty set of CUDA graphs to capture into; None where the settings or the device want none."""
    config, device = resolved.config.compile_config, resolved.device
    if config is None or config.cuda_graphs == "off":
        return None
    return CudaGraphs(device) if config.cuda_graphs != "auto" or device.type == "cuda" else None


def capture(runner: ModelRunner, resolved: ResolvedRuntime, progress: Progress) -> None:
    """Plan all sizes, and capture them now unless that is left to idle moments."""
    launch_bound = least_of_ranks(_launch_bound_tokens(runner, resolved), resolved.world_size)
    sizes, mixed = graph_sizes(resolved, launch_bound)
    decodes = decode_captures(resolved, sizes) if resolved.generates else ()
    number = runner.plan_captures(decodes, mixed)
    for count in range(0 if is_lazy(resolved.config) else number):
        runner.capture_next()
        progress("cuda_graphs", (count + 1) / number, "")


def graph_sizes(
    resolved: ResolvedRuntime, launch_bound_tokens: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes to capture: of decode steps in requests, of mixed steps in tokens."""
    most_seqs = min(resolved.max_num_seqs, resolved.max_num_batched_tokens)
    decode = {size for size in DECODE_SIZES if size < most_seqs} | {min(most_seqs, DECODE_SIZES[-1])}
    large = tuple(size for size in LARGE_MIXED_SIZES if size <= launch_bound_tokens)
    mixed = tuple(size for size in MIXED_SIZES + large if size <= resolved.max_num_batched_tokens)
    return tuple(sorted(decode)), mixed


def decode_captures(resolved: ResolvedRuntime, sizes: Sequence[int]) -> tuple[Decode, ...]:
    """Decode steps of these numbers of requests to capture: without drafts and, where they fit, with some.

    Where ranks share the vocabulary out, of greedy samples alone, too: of so many that gathering all logits
    takes time. All stages of a pipeline capture the same, most of which sample nothing: there are none.
    """
    k = resolved.max_drafts
    kinds = [(0, 0), *((drafts, k) for drafts in (0, *draft_lengths(k)) if k)]
    keys = [
        Decode(size, 1 + drafts, num_next)
        for size in sizes
        for drafts, num_next in kinds
        if not num_next or size * (1 + max(drafts, 1)) <= resolved.max_num_samples
    ]
    if resolved.shares_vocabulary and not resolved.stages:
        many = [key for key in keys if key.size * key.query_len >= FEWEST_GREEDY]
        keys += [replace(key, is_greedy=True) for key in many]
    return tuple(keys)


def is_lazy(config: RuntimeConfig) -> bool:
    """Whether captures are left to moments in which there is nothing else to do."""
    return config.compile_config is not None and config.compile_config.cuda_graphs == "lazy"


def _launch_bound_tokens(runner: ModelRunner, resolved: ResolvedRuntime) -> int:
    """Up to how many tokens of a step the host takes longer to call the pieces than the GPU to run them."""
    most = min(LARGE_MIXED_SIZES[-1], resolved.max_num_batched_tokens)
    if resolved.device.type != "cuda" or most < LARGE_MIXED_SIZES[0]:
        return 0

    def seconds() -> tuple[float, float]:
        torch.cuda.synchronize(resolved.device)
        started = time.perf_counter()
        runner.profile(most, 1)
        launched = time.perf_counter()
        torch.cuda.synchronize(resolved.device)
        return launched - started, time.perf_counter() - started

    return launch_bound_tokens(most, [seconds() for _ in range(4)][1:])  # the first loads and compiles


def launch_bound_tokens(num_tokens: int, seconds: Sequence[tuple[float, float]]) -> int:
    """Up to how many tokens the host is slower than the GPU, or nearly, by steps of num_tokens.

    seconds: of each step when all was launched, and when all was done. Where the host is slower, the two are
    one but for the last launches, whatever slows the machine; a step of one token, timed beside one of many,
    said one thing in one start and another in the next. Where the two are near, a capture costs a little
    memory, and the want of one costs time.
    """
    launched, done = (statistics.median(times) for times in zip(*seconds, strict=True))
    return int(num_tokens * NEARLY_BOUND * launched / done)
