"""Lamina: a torch.compile-centred runtime for LLaMA-family language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .common.errors import (
    ClosedError,
    CompileError,
    ConfigError,
    EngineDeadError,
    EngineError,
    KernelBuildError,
    LaminaError,
    LoadError,
    LogitsError,
    NotWarmError,
    OutOfBlocksError,
    ProcessorError,
    RequestError,
    ShapeError,
    StoreError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from .compiler.config import CompileConfig
    from .compiler.passes.graph import Pass, PassReport
    from .models.registry import register_model
    from .runtime.adapters.config import LoRAConfig
    from .runtime.async_runtime import AsyncRuntime
    from .runtime.engine.beam_search import BeamSearchParams
    from .runtime.engine.logprobs import Logprob
    from .runtime.engine.outputs import CompletionOutput, RequestOutput, StreamDelta
    from .runtime.engine.pooling_outputs import ClassificationOutput, EmbeddingOutput, ScoreOutput
    from .runtime.profiling import profile
    from .runtime.quantize import QuantizedModel, quantize
    from .runtime.runtime import Runtime
    from .runtime.sampling_params import SamplingParams
    from .runtime.speculation.config import Draft, Eagle, NGram
    from .runtime.structured_outputs import StructuredOutputs
    from .runtime.weight_group import WeightGroup

__version__ = "0.1.0"
__all__ = [
    "Runtime",
    "AsyncRuntime",
    "SamplingParams",
    "StructuredOutputs",
    "BeamSearchParams",
    "CompileConfig",
    "LoRAConfig",
    "NGram",
    "Draft",
    "Eagle",
    "WeightGroup",
    "Pass",
    "PassReport",
    "register_model",
    "profile",
    "quantize",
    "QuantizedModel",
    "RequestOutput",
    "CompletionOutput",
    "StreamDelta",
    "Logprob",
    "EmbeddingOutput",
    "ClassificationOutput",
    "ScoreOutput",
    "LaminaError",
    "ConfigError",
    "LogitsError",
    "RequestError",
    "ProcessorError",
    "EngineError",
    "EngineDeadError",
    "ShapeError",
    "LoadError",
    "UnsupportedError",
    "OutOfBlocksError",
    "CompileError",
    "NotWarmError",
    "KernelBuildError",
    "StoreError",
    "ClosedError",
]

# Imported when first asked for: `import lamina` stays free of torch, and `lamina --help` answers at once.
_HOMES = {
    "Runtime": ".runtime.runtime",
    "AsyncRuntime": ".runtime.async_runtime",
    "SamplingParams": ".runtime.sampling_params",
    "StructuredOutputs": ".runtime.structured_outputs",
    "BeamSearchParams": ".runtime.engine.beam_search",
    "CompileConfig": ".compiler.config",
    "LoRAConfig": ".runtime.adapters.config",
    "NGram": ".runtime.speculation.config",
    "Draft": ".runtime.speculation.config",
    "Eagle": ".runtime.speculation.config",
    "WeightGroup": ".runtime.weight_group",
    "Pass": ".compiler.passes",
    "PassReport": ".compiler.passes",
    "profile": ".runtime.profiling",
    "quantize": ".runtime.quantize",
    "QuantizedModel": ".runtime.quantize",
    "register_model": ".models",
    "RequestOutput": ".runtime.engine.outputs",
    "CompletionOutput": ".runtime.engine.outputs",
    "StreamDelta": ".runtime.engine.outputs",
    "Logprob": ".runtime.engine.logprobs",
    "EmbeddingOutput": ".runtime.engine.pooling_outputs",
    "ClassificationOutput": ".runtime.engine.pooling_outputs",
    "ScoreOutput": ".runtime.engine.pooling_outputs",
}


if not TYPE_CHECKING:  # a checker that saw it would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
