"""What a loaded runtime is, as plain data."""

from typing import Any

from ..protocol.core_description import CoreDescription
from ..sampling_params import MODEL_DEFAULTS
from .loaded import LoadedRuntime


def describe(loaded: LoadedRuntime) -> CoreDescription:
    """Returns what whoever checks requests has to know of a runtime."""
    resolved, config = loaded.resolved, loaded.resolved.config
    return CoreDescription(
        model=str(config.model),
        folder=str(resolved.folder),
        device=str(resolved.device),
        defaults=resolved.defaults,
        generation_defaults=config.generation_defaults,
        eos_token_ids=tuple(sorted(loaded.eos_token_ids)),
        vocab_size=resolved.model.vocab_size,
        num_valid_ids=loaded.num_valid_ids,
        max_model_len=resolved.max_model_len,
        declared_len=resolved.model.max_position_embeddings,
        capacity_tokens=loaded.kv_cache.capacity_tokens,
        seed=config.seed,
        pooling=resolved.pooling,
        max_loras=0 if resolved.slot_layout is None else resolved.slot_layout.num_slots,
        settings=settings_in_force(loaded),
    )


def settings_in_force(loaded: LoadedRuntime) -> dict[str, Any]:
    """Returns every setting that was left to choose, as chosen, under names that stay."""
    resolved = loaded.resolved
    return {
        "eos_token_ids": sorted(loaded.eos_token_ids),
        "sampling_defaults": _named_defaults(loaded),
        "rope": resolved.model.rope.rope_type,
        "max_model_len": resolved.max_model_len,
        "max_num_seqs": resolved.max_num_seqs,
        "max_num_batched_tokens": resolved.max_num_batched_tokens,
        "block_size": resolved.block_size,
        "dtype": str(resolved.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(resolved.kv_cache_dtype).removeprefix("torch."),
        "quantization": resolved.schemes.name,
        "attention": loaded.attention,
        "batch_invariant": resolved.config.batch_invariant,
        "gemm_kernels": list(loaded.gemm_kernels),
        "device": str(resolved.device),
    }


def _named_defaults(loaded: LoadedRuntime) -> dict[str, Any]:
    return {name: getattr(loaded.resolved.defaults, name) for name in MODEL_DEFAULTS}
