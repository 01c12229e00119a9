"""What transformers computes of a model, layer by layer: the reference that a runtime is compared with."""

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..common.errors import UnsupportedError
from .startup.resolved import ResolvedRuntime


@dataclass(slots=True)
class Observed:
    """What a run showed: query, key and value of each layer, as attention met them; the logits [T, vocab]."""

    layers: list[tuple[Tensor, ...]] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))


def by_transformers(
    resolved: ResolvedRuntime, weights: Mapping[str, Tensor], ids: Sequence[Sequence[int]]
) -> tuple[list[Observed] | None, str]:
    """What transformers computes in a dtype wider than ours on the CPU, or None and why not.

    The model is the checkpoint's; where projections are kept by a scheme, one of what they stand for.
    """
    try:
        with _without_bars():
            model = _dequantized_model(resolved, weights) if resolved.schemes.name else _model(resolved)
    except Exception as error:  # an architecture it does not know, files it cannot read
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return None, f"not compared with transformers: {lines[0]}"
    runs = []
    for prompt in ids:
        observed = Observed()
        with torch.inference_mode(), _watched(model, observed):
            observed.logits = model(torch.tensor([list(prompt)]), use_cache=False).logits[0]
        runs.append(observed)
    return runs, "transformers"


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """No progress bar of transformers' beside our own."""
    from transformers.utils import logging

    settings: Any = logging
    had_bars = settings.is_progress_bar_enabled()
    settings.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            settings.enable_progress_bar()


@contextlib.contextmanager
def _watched(model: Any, observed: Observed) -> Iterator[None]:
    """Query, key and value of each layer, as transformers' own attention formula is handed them."""
    module: Any = sys.modules[type(model).__module__]
    formula = module.eager_attention_forward

    def attention(layer: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        observed.layers.append(tuple(tensor[0].transpose(0, 1) for tensor in (query, key, value)))
        return formula(layer, query, key, value, *rest, **options)

    module.eager_attention_forward = attention
    try:
        yield
    finally:
        module.eager_attention_forward = formula


def _wide(resolved: ResolvedRuntime) -> torch.dtype:
    return torch.float32 if resolved.dtype.itemsize < 4 else torch.float64


def _model(resolved: ResolvedRuntime) -> Any:
    """The model of the checkpoint's folder."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        resolved.folder, dtype=_wide(resolved), attn_implementation="eager", local_files_only=True
    )


def _dequantized_model(resolved: ResolvedRuntime, weights: Mapping[str, Tensor]) -> Any:
    """A model of its architecture whose weights are what the runtime's stand for, the head its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_config
    config: Any = AutoConfig.from_pretrained(resolved.folder, local_files_only=True)
    config.tie_word_embeddings = False
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    wide = _wide(resolved)
    model = make(config, dtype=wide, attn_implementation="eager")
    tensors = {name: rows.to("cpu", wide) for name, rows in resolved.schemes.restored(weights).items()}
    missing, unknown = model.load_state_dict(tensors, strict=False)
    if missing or unknown:
        raise UnsupportedError(f"transformers names weights otherwise: {sorted([*missing, *unknown])[:3]}")
    return model.eval()
