"""A model's settings resolved without any file of it."""

from pathlib import Path

import torch

from lamina.common.store import Store
from lamina.models.config import ModelConfig
from lamina.models.generation_config import GenerationDefaults
from lamina.models.quantization.model_schemes import uniform
from lamina.models.quantization.scheme import find_scheme
from lamina.models.registry import find_model
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.startup.resolve import resolve
from lamina.runtime.startup.resolved import ResolvedRuntime


def resolve_alone(
    config: RuntimeConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> ResolvedRuntime:
    """What the settings come to for this model, on a device that is at hand or not."""
    definition = find_model(model.architecture)
    return resolve(
        config,
        store=Store(config.cache_dir),
        folder=Path("nowhere"),
        checkpoint=None,
        model=model,
        definition=definition,
        pooling=None,
        defaults=GenerationDefaults(),
        schemes=uniform(find_scheme(config.quantization), definition.parameters(model)),
        dtype=dtype,
        device=device,
    )
