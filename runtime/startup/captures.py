"""Which sizes of steps are captured as CUDA graphs, and which of them when a runtime starts."""

from collections.abc import Sequence
from dataclasses import replace

from ...common.progress import Progress
from ...compiler.execution.cuda_graphs import CudaGraphs
from ..config import RuntimeConfig
from ..speculation.config import draft_lengths
from ..worker.graph_runner import Decode, PlannedCaptures
from ..worker.model_runner import ModelRunner
from .resolved import ResolvedRuntime

DECODE_SIZES = (1, 2, 4, *range(8, 257, 8))
# Beyond 256 as far apart as the rows of a GEMM's tiles, which are computed anyway. Of up to about 2,048
# tokens a host takes longer to launch the kernels than a GPU to run them.
MIXED_SIZES = (16, 32, 64, 128, 256, *range(384, 2049, 128))
# Captured at a start, and all others fit into them: up to 256 few enough padded rows that they cost little.
FIRST_SIZES = (1, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048)
FEWEST_GREEDY = 8  # samples of steps that are captured without gathering logits; fewer are gathered as soon


def new_cuda_graphs(resolved: ResolvedRuntime) -> CudaGraphs | None:
    """An empty set of CUDA graphs to capture into; None where the settings or the device want none."""
    config, device = resolved.config.compile_config, resolved.device
    if config is None or config.cuda_graphs == "off":
        return None
    return CudaGraphs(device) if config.cuda_graphs != "auto" or device.type == "cuda" else None


def capture(runner: ModelRunner, resolved: ResolvedRuntime, progress: Progress) -> None:
    """Plan all sizes, and capture those now that are not left to moments with little to do."""
    sizes, mixed = graph_sizes(resolved)
    decodes = decode_captures(resolved, sizes) if resolved.generates else ()
    first, between_steps = first_sizes(resolved, sizes, mixed), captures_between_steps(resolved)
    number = runner.plan_captures(PlannedCaptures(decodes, mixed, first, between_steps))
    for count in range(number):
        runner.capture_next()
        progress("cuda_graphs", (count + 1) / number, "")


def graph_sizes(resolved: ResolvedRuntime) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes to capture: of decode steps in requests, of mixed steps in tokens."""
    most_seqs = min(resolved.max_num_seqs, resolved.max_num_batched_tokens)
    decode = {size for size in DECODE_SIZES if size < most_seqs} | {min(most_seqs, DECODE_SIZES[-1])}
    mixed = tuple(size for size in MIXED_SIZES if size <= resolved.max_num_batched_tokens)
    return tuple(sorted(decode)), mixed


def first_sizes(
    resolved: ResolvedRuntime, decode_sizes: Sequence[int], mixed_sizes: Sequence[int]
) -> frozenset[int] | None:
    """The sizes that are captured before the runtime is ready; None: all of them."""
    if is_lazy(resolved.config):
        return frozenset()
    if not captures_between_steps(resolved):
        return None
    return frozenset({*FIRST_SIZES, *decode_sizes[-1:], *mixed_sizes[-1:]})


def captures_between_steps(resolved: ResolvedRuntime) -> bool:
    """Whether sizes may be captured while requests are live.

    Ranks would have to agree where one of them cannot, and drafters keep more on the device between two steps
    than is kept there meanwhile.
    """
    config = resolved.config.compile_config
    is_auto = config is not None and config.cuda_graphs == "auto"
    return is_auto and resolved.world_size == 1 and not resolved.max_drafts


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
