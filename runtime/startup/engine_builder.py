"""The engine put together over workers that are ready: the books of the cache, the scheduler, the core."""

from typing import TextIO

from ..config import TOKENS_BESIDE_DECODE
from ..engine.engine_core import EngineCore
from ..executor.executor import Executor
from ..kv_cache.block_pool import BlockPool
from ..kv_cache.manager import KVCacheManager
from ..scheduler.config import SchedulerConfig
from ..scheduler.decision_log import DecisionLog, open_decision_log
from ..scheduler.scheduler import Scheduler
from . import memory
from .loaded import LoadedRuntime, LoadedWorker, Vocabulary
from .resolved import ResolvedRuntime
from .stopwatch import Stopwatch
from .warm_manifest import LateBuilds

# How much longer a token more makes a step, as a part of a step of next to none: what drafts are weighed by.
TOKEN_COSTS = {"cuda": 1 / 600, "cpu": 1 / 12}
DEPTHS = {"cuda": 2, "cpu": 1}  # steps launched before the oldest is read; a CPU is busy with the step itself


def build_engine(
    resolved: ResolvedRuntime,
    executor: Executor,
    *,
    worker: LoadedWorker | None,
    vocabulary: Vocabulary,
    attention: str,
    gemm_kernels: tuple[str, ...],
    late_builds: LateBuilds,
    watch: Stopwatch,
) -> LoadedRuntime:
    """The runtime that serves, over the workers of an executor; worker: the one in this process, if it is."""
    kv_cache, decision_log = _new_kv_cache(resolved), _open_decision_log(resolved)
    scheduler = _new_scheduler(resolved, kv_cache, decision_log)
    core = EngineCore(scheduler, executor, depth=_depth(resolved))
    watch.lap("kv_cache")
    return LoadedRuntime(
        resolved=resolved,
        core=core,
        executor=executor,
        kv_cache=kv_cache,
        worker=worker,
        tokenizer=vocabulary.tokenizer,
        grammars=vocabulary.grammars,
        eos_token_ids=vocabulary.eos_token_ids,
        num_valid_ids=vocabulary.num_valid_ids,
        attention=attention,
        gemm_kernels=gemm_kernels,
        decision_log=decision_log,
        late_builds=late_builds,
        watch=watch,
    )


def _depth(resolved: ResolvedRuntime) -> int:
    """Steps in flight: of a pipeline one a stage, and where the host is not the device one that waits."""
    depth = DEPTHS[resolved.device.type]
    return len(resolved.stages) + depth - 1 if resolved.stages else depth


def _new_kv_cache(resolved: ResolvedRuntime) -> KVCacheManager:
    groups = memory.groups_of(resolved)
    return KVCacheManager(
        BlockPool(memory.pool_blocks(resolved.num_kv_blocks, groups)),
        resolved.block_size,
        prefix_cache=resolved.config.prefix_cache,
        windows=[group.window for group in groups],
        swap_slots=memory.swap_slots(resolved),
    )


def _open_decision_log(resolved: ResolvedRuntime) -> TextIO | None:
    path = resolved.config.record
    return None if path is None else open_decision_log(path)


def _new_scheduler(
    resolved: ResolvedRuntime, kv_cache: KVCacheManager, decision_log: TextIO | None
) -> Scheduler:
    limits = SchedulerConfig(
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
        max_tokens_beside_decode=max(TOKENS_BESIDE_DECODE, resolved.max_num_seqs),
        prefill_chunk=resolved.prefill_chunk,
        max_prefill_tokens=resolved.max_prefill_tokens,
        max_drafts=resolved.max_drafts,
        token_cost=TOKEN_COSTS[resolved.device.type],
        max_num_samples=resolved.max_num_samples,
        num_lookahead_tokens=0 if resolved.drafter is None else resolved.max_drafts,
        max_loras=0 if resolved.slot_layout is None else resolved.slot_layout.num_slots,
        num_batches=_depth(resolved) if resolved.stages else 1,
    )
    return Scheduler(limits, kv_cache, DecisionLog(decision_log) if decision_log else None)
