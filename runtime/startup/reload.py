"""A model that is loaded, set up anew: other settings on the same weights and plan."""

from typing import NamedTuple

from ...common.progress import Progress
from ...compiler.execution.plan import Compiled
from ...models.checkpoints.loaded_weights import LoadedWeights
from ..config import RuntimeConfig
from .builder import build_worker
from .drafter_build import LoadedDrafter
from .loaded import LoadedRuntime, Vocabulary
from .loader import engine_over, resolve_runtime, select_attention
from .stopwatch import Stopwatch


class KeptModel(NamedTuple):
    """What of a loaded runtime outlives it: everything but its cache, its captures and its engine."""

    compiled: Compiled | None
    compiled_adapted: Compiled | None
    weights: LoadedWeights
    drafter: LoadedDrafter | None
    vocabulary: Vocabulary


def keep_model(loaded: LoadedRuntime) -> KeptModel:
    """A runtime's model. UnsupportedError where its workers have processes of their own."""
    worker = loaded.local
    return KeptModel(
        compiled=worker.compiled,
        compiled_adapted=worker.compiled_adapted,
        weights=worker.weights,
        drafter=worker.drafter,
        vocabulary=Vocabulary(loaded.tokenizer, loaded.eos_token_ids, loaded.num_valid_ids, loaded.grammars),
    )


def load_again(model: KeptModel, config: RuntimeConfig, progress: Progress) -> LoadedRuntime:
    """A kept model ready with other settings, of which none may change its weights or its plan.

    Raises what loading raises.
    """
    watch, vocabulary = Stopwatch(), model.vocabulary
    resolved = resolve_runtime(config, progress)
    attention = select_attention(resolved)
    worker = build_worker(
        resolved,
        attention=attention,
        compiled=model.compiled,
        compiled_adapted=model.compiled_adapted,
        weights=model.weights,
        drafter=model.drafter,
        num_valid_ids=vocabulary.num_valid_ids,
        grammars=vocabulary.grammars,
        progress=progress,
        watch=watch,
    )
    return engine_over(worker, vocabulary, watch)
