"""The engine over workers in processes of their own, which load their parts meanwhile."""

import pickle
from collections.abc import Callable
from dataclasses import replace

import torch

from ...common.errors import ConfigError, shown
from ...common.logging import get_logger
from ...common.progress import Progress
from ..config import RuntimeConfig
from ..executor.multiproc import MultiprocExecutor
from ..protocol.process_messages import LoadProgress
from .engine_builder import build_engine
from .loaded import LoadedRuntime, Vocabulary
from .resolved import ResolvedRuntime
from .stopwatch import Stopwatch
from .warm_manifest import LateBuilds

logger = get_logger("runtime")


def load_over_processes(
    resolved: ResolvedRuntime,
    progress: Progress,
    watch: Stopwatch,
    read_vocabulary: Callable[[ResolvedRuntime], Vocabulary],
) -> LoadedRuntime:
    """The engine over spawned workers that have loaded their parts.

    Raises what loading raises in any of them, and ConfigError for settings that cannot be sent to them; no
    process is left then.
    """
    config = _pickled(resolved.config)

    def report(message: LoadProgress) -> None:
        progress(message.stage, message.fraction, message.detail)

    executor = MultiprocExecutor(resolved.config.parallel.world_size, report)
    try:
        executor.start(config, log_level=logger.getEffectiveLevel(), num_threads=torch.get_num_threads())
        vocabulary = read_vocabulary(resolved)
        ready = executor.wait_until_ready()
        watch.take_over(ready.seconds)
        watch.overlapped.update(ready.overlapped)
        return build_engine(
            replace(resolved, num_kv_blocks=ready.num_kv_blocks, swap_bytes=ready.swap_bytes),
            executor,
            worker=None,
            vocabulary=vocabulary,
            attention=ready.attention,
            gemm_kernels=ready.gemm_kernels,
            late_builds=LateBuilds(strict=False),
            watch=watch,
        )
    except BaseException:
        executor.shutdown(0)
        resolved.store.sweep()
        raise


def _pickled(config: RuntimeConfig) -> bytes:
    try:
        return pickle.dumps(config)
    except Exception as error:  # somebody else's object: anything may come out of it
        raise ConfigError(
            f"a setting cannot be sent to the workers' processes: {shown(error, 300)}; use executor='uniproc'"
        ) from error
