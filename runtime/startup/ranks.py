"""One rank of a runtime whose workers have processes of their own: its group, and what it loads."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...common.progress import Progress
from ...compiler import cache
from ...custom_ops.all_reduce.gloo_group import GlooGroup
from ...custom_ops.all_reduce.group import Group, MirrorGroup, current_group, set_group
from ..config import RuntimeConfig
from ..parallel import ParallelConfig
from ..protocol.worker_messages import WorkerReady
from .loaded import LoadedWorker
from .loader import load_rank, note_use
from .stopwatch import Stopwatch
from .worker_facts import facts_of

SECONDS_TO_WAIT = 1800.0  # for a rank that compiles or measures; one that is lost is noticed by the executor


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedRank:
    """A worker that is ready, what may be asked of it, and what it says first."""

    worker: LoadedWorker
    facts: Mapping[str, Callable[[], Any]]
    ready: WorkerReady


@contextmanager
def joined_ranks(meeting: str, parallel: ParallelConfig, *, rank: int, num_threads: int) -> Iterator[None]:
    """While it lasts, this process is a rank of those that meet there, and of those that share its layers.

    GroupError where the others do not come. After an error the group is left open until the process ends, so
    that no other rank fails before this one could say why.
    """
    torch.set_num_threads(num_threads)
    if parallel.world_size == 1:
        yield
        return
    world = GlooGroup(meeting, rank=rank, size=parallel.world_size, timeout=SECONDS_TO_WAIT)
    set_group(_group_of_layers(world, parallel), world)
    yield
    own = current_group()  # by now perhaps one of GPUs
    set_group(None)
    own.close()
    world.close()


def _group_of_layers(world: GlooGroup, parallel: ParallelConfig) -> Group:
    """The ranks that have parts of the same layers: ranks of a stage follow each other."""
    if parallel.pipeline_parallel == 1:
        return world
    return MirrorGroup(1) if parallel.tensor_parallel == 1 else world.part(parallel.tensor_parallel)


def open_rank(config: RuntimeConfig, progress: Progress) -> LoadedRank:
    """This process's part of a model, ready to run steps. Raises what loader.load() does."""
    watch = Stopwatch()
    worker = load_rank(config, progress, watch)
    return LoadedRank(
        worker=worker, facts=facts_of(worker, partial(note_use, worker.resolved)), ready=_ready(worker, watch)
    )


def _ready(worker: LoadedWorker, watch: Stopwatch) -> WorkerReady:
    resolved = worker.resolved
    return WorkerReady(
        num_kv_blocks=resolved.num_kv_blocks,
        swap_bytes=resolved.swap_bytes,
        attention=worker.attention,
        gemm_kernels=worker.gemm_kernels,
        decisions=_decisions(worker),
        seconds=dict(watch.seconds),
        overlapped=dict(watch.overlapped),
    )


def _decisions(worker: LoadedWorker) -> dict[str, str]:
    """What every rank must have decided alike, in words."""
    resolved = worker.resolved
    captures = [str(record.key) for record in worker.cuda_graphs.ledger()] if worker.cuda_graphs else []
    factors = resolved.plan_factors()
    return {
        "num_kv_blocks": str(resolved.num_kv_blocks),
        "swap_bytes": str(resolved.swap_bytes),
        "block_size": str(resolved.block_size),
        "dtype": f"{resolved.dtype}, {resolved.kv_cache_dtype} in the cache",
        "attention": worker.attention,
        "kernels of GEMMs": "; ".join(worker.gemm_kernels),
        "plan": "eager" if factors is None else cache.plan_key(factors),
        "captures": " ".join(captures),
    }
