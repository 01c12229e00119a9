"""What lives once a model is loaded, in one flat object."""

from dataclasses import dataclass
from typing import TextIO

from ...compiler.execution.cuda_graphs import CudaGraphs
from ...compiler.execution.plan import Compiled
from ...models.checkpoints.loaded_weights import LoadedWeights
from ..engine.engine_core import EngineCore
from ..kv_cache.manager import KVCacheManager
from ..structured_output.compiler import GrammarCompiler
from ..tokenization.tokenizer import Tokenizer
from ..worker.model_runner import ModelRunner
from .drafter_build import LoadedDrafter
from .resolved import ResolvedRuntime
from .stopwatch import Stopwatch
from .warm_manifest import LateBuilds


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedRuntime:
    """Everything a runtime holds while it serves, and what its statistics are read from."""

    resolved: ResolvedRuntime
    core: EngineCore
    kv_cache: KVCacheManager
    runner: ModelRunner
    cuda_graphs: CudaGraphs | None
    compiled: Compiled | None  # None: the model runs eagerly
    weights: LoadedWeights
    drafter: LoadedDrafter | None  # of a model or head that drafts, if any
    tokenizer: Tokenizer | None
    grammars: GrammarCompiler | None  # for its tokenizer
    eos_token_ids: frozenset[int]  # every id that ends an answer
    num_valid_ids: int  # ids from here on are padding of the vocabulary
    attention: str  # the name of who computes it
    gemm_kernels: tuple[str, ...]  # what serves each GEMM, where that is chosen by measurement
    decision_log: TextIO | None  # to be closed
    late_builds: LateBuilds
    watch: Stopwatch  # seconds of the start
