"""The engine over workers in processes of their own, spawned or Ray's, which load their parts meanwhile."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from ...common import env
from ...common.errors import ConfigError, shown
from ...common.logging import get_logger
from ...common.progress import Progress
from ..config import RuntimeConfig
from ..executor.ray_workers import RayWorkers
from ..executor.remote import RemoteExecutor
from ..executor.worker_processes import WorkerProcesses
from ..executor.workers import StartWorkers
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
    """The engine over workers that have loaded their parts.

    Raises what loading raises in any of them, and ConfigError for settings that cannot be sent to them; no
    process is left then.
    """
    config = _pickled(resolved.config)

    def report(message: LoadProgress) -> None:
        progress(message.stage, message.fraction, message.detail)

    parallel, num_threads = resolved.config.parallel, torch.get_num_threads()
    start_workers = _starter(resolved, max(1, num_threads // parallel.world_size))
    executor = RemoteExecutor(parallel.world_size, report, start_workers, parallel.pipeline_parallel)
    try:
        executor.start(config, log_level=logger.getEffectiveLevel(), num_threads=num_threads)
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


def _starter(resolved: ResolvedRuntime, num_threads: int) -> StartWorkers:
    """Who starts the workers; num_threads: of each."""
    parallel = resolved.config.parallel
    if parallel.executor != "ray":
        return partial(
            WorkerProcesses, environments=environments_of_ranks(parallel.world_size, resolved.device)
        )
    on_gpu = resolved.device.type == "cuda"
    return partial(
        RayWorkers,
        num_cpus=1 if on_gpu else num_threads,
        num_gpus=1 if on_gpu else 0,
        placement=parallel.ray_placement,
        num_stages=parallel.pipeline_parallel,
    )


def environments_of_ranks(ranks: int, device: torch.device) -> list[dict[str, str]] | None:
    """Of workers, each of which sees one GPU alone, so that all load the same plan; None: as it is here.

    ConfigError where there are fewer GPUs than ranks, or one is named.
    """
    if device.type != "cuda" or ranks == 1:
        return None
    if device.index is not None:
        got = f"device is {str(device)!r} and {ranks} ranks have a GPU each"
        raise ConfigError(f"{got}; wanted 'cuda': CUDA_VISIBLE_DEVICES says which GPUs")
    gpus = env.visible_gpus()
    if gpus is None:
        gpus = [str(number) for number in range(torch.cuda.device_count())]
    if len(gpus) < ranks:
        got = f"{ranks} ranks are asked for, each on a GPU of its own, and {len(gpus)} are visible"
        raise ConfigError(f"{got}; wanted as many, or device='cpu'")
    return [env.with_gpus([gpu]) for gpu in gpus[:ranks]]


def _pickled(config: RuntimeConfig) -> bytes:
    try:
        return pickle.dumps(config)
    except Exception as error:  # somebody else's object: anything may come out of it
        raise ConfigError(
            f"a setting cannot be sent to the workers' processes: {shown(error, 300)}; use executor='uniproc'"
        ) from error
