"""What lives once a model is loaded: a worker's part, and the runtime around it."""

from dataclasses import dataclass
from typing import NamedTuple, TextIO

from ...common.errors import UnsupportedError
from ...compiler.execution.cuda_graphs import CudaGraphs
from ...compiler.execution.plan import Compiled
from ...models.checkpoints.loaded_weights import LoadedWeights
from ..engine.engine_core import EngineCore
from ..engine.first_step import FirstStep
from ..executor.executor import Executor
from ..kv_cache.manager import KVCacheManager
from ..structured_output.compiler import GrammarCompiler
from ..tokenization.tokenizer import Tokenizer
from ..worker.model_runner import ModelRunner
from .drafter_build import LoadedDrafter
from .resolved import ResolvedRuntime
from .stopwatch import Stopwatch
from .warm_manifest import LateBuilds


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedWorker:
    """What one worker holds: its part of the model, and what runs steps on it."""

    resolved: ResolvedRuntime
    runner: ModelRunner
    cuda_graphs: CudaGraphs | None
    compiled: Compiled | None  # None: the model runs eagerly
    compiled_adapted: Compiled | None  # of steps with adapters, if there may be any
    weights: LoadedWeights
    drafter: LoadedDrafter | None  # of a model or head that drafts, if any
    attention: str  # the name of who computes it
    gemm_kernels: tuple[str, ...]  # what serves each GEMM, where that is chosen by measurement
    late_builds: LateBuilds


class Vocabulary(NamedTuple):
    """What token ids mean to whoever checks requests and constrains samples."""

    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]  # every id that ends an answer
    num_valid_ids: int  # ids from here on are padding of the vocabulary
    grammars: GrammarCompiler | None  # for its tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedRuntime:
    """Everything a runtime holds while it serves, and what its statistics are read from."""

    resolved: ResolvedRuntime
    core: EngineCore
    executor: Executor  # the core's, which shuts it down
    kv_cache: KVCacheManager
    worker: LoadedWorker | None  # None: workers are in processes of their own
    tokenizer: Tokenizer | None
    grammars: GrammarCompiler | None  # for its tokenizer
    eos_token_ids: frozenset[int]  # every id that ends an answer
    num_valid_ids: int  # ids from here on are padding of the vocabulary
    attention: str  # the name of who computes it
    gemm_kernels: tuple[str, ...]  # what serves each GEMM, where that is chosen by measurement
    decision_log: TextIO | None  # to be closed
    late_builds: LateBuilds  # in this process
    watch: Stopwatch  # seconds of the start

    @property
    def first_step(self) -> FirstStep | None:
        """What of a call is launched before the rest of it is made.

        None where a step is waited for, and in a pipeline: its batches share out all requests that there are.
        """
        resolved = self.resolved
        if self.core.depth == 1 or resolved.stages:
            return None
        return FirstStep(
            num_tokens=resolved.max_num_batched_tokens,
            num_rows=resolved.max_num_seqs,
            chunk=resolved.prefill_chunk or resolved.max_num_batched_tokens,
            kv_cache=self.kv_cache,
        )

    @property
    def local(self) -> LoadedWorker:
        """The worker in this process. UnsupportedError where workers have processes of their own."""
        if self.worker is None:
            raise UnsupportedError(
                "workers have processes of their own here, and what they hold cannot be seen from outside; "
                "use executor='uniproc'"
            )
        return self.worker

    @property
    def runner(self) -> ModelRunner:
        """What runs steps in this process; see local."""
        return self.local.runner

    @property
    def compiled(self) -> Compiled | None:
        """The plan of this process; see local."""
        return self.local.compiled

    @property
    def weights(self) -> LoadedWeights:
        """The weights in this process; see local."""
        return self.local.weights

    @property
    def drafter(self) -> LoadedDrafter | None:
        """What drafts in this process; see local."""
        return self.local.drafter

    @property
    def cuda_graphs(self) -> CudaGraphs | None:
        """The captures of this process; see local."""
        return self.local.cuda_graphs
