"""Rotation angles of the rotary position embedding, as tables of cosines and sines."""

import dataclasses
import math

import torch
from torch import Tensor

from ..common.errors import ConfigError, UnsupportedError, shown
from .config import ModelConfig
from .rope_config import RopeConfig


def table_rows(config: ModelConfig, max_model_len: int) -> int:
    """The number of positions that rope_tables covers."""
    return max(config.max_position_embeddings, max_model_len)


def rotation_shapes(config: ModelConfig, max_model_len: int) -> dict[str, tuple[int, int]]:
    """The shape of every table that rotation_tables gives."""
    shape = (table_rows(config, max_model_len), config.rotary_dim // 2)
    return {f"{prefix}_{kind}": shape for prefix in _ropes(config) for kind in ("cos", "sin")}


def rotation_tables(
    config: ModelConfig, *, max_model_len: int, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor]:
    """rope_cos and rope_sin, and the same of sliding_rope where the sliding layers have their own."""
    tables: dict[str, Tensor] = {}
    for prefix, rope in _ropes(config).items():
        own = dataclasses.replace(config, rope=rope)
        pair = rope_tables(own, max_model_len=max_model_len, dtype=dtype, device=device)
        tables |= dict(zip((f"{prefix}_cos", f"{prefix}_sin"), pair, strict=True))
    return tables


def _ropes(config: ModelConfig) -> dict[str, RopeConfig]:
    return {"rope": config.rope} | ({"sliding_rope": config.sliding_rope} if config.sliding_rope else {})


def rope_tables(
    config: ModelConfig, *, max_model_len: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [rows, rotated / 2] of every position, float32 for every dtype but float64."""
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies, attention_factor = inverse_frequencies(config, max_model_len)
    num_rows = table_rows(config, max_model_len)
    try:
        angles = torch.outer(torch.arange(num_rows, dtype=dtype), frequencies.to(dtype))
        return (angles.cos() * attention_factor).to(device), (angles.sin() * attention_factor).to(device)
    except RuntimeError as error:  # what a failed allocation is to torch, on a CPU
        raise ConfigError(
            f"max_position_embeddings is {config.max_position_embeddings}; wanted rotations that fit into "
            f"memory, not {num_rows} rows: {error}"
        ) from error


def inverse_frequencies(config: ModelConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Radians per position [rotated / 2] float32 of every pair, and the factor on cosine and sine.

    ConfigError where the config's numbers have no finite ones.
    """
    try:
        frequencies, attention_factor = _frequencies(config, max_model_len)
        is_finite = bool(frequencies.isfinite().all()) and math.isfinite(attention_factor)
    except ConfigError:
        raise
    except (ArithmeticError, ValueError) as error:
        raise ConfigError(f"rope is {config.rope}; wanted one with finite angles: {error}") from error
    if not is_finite:
        raise ConfigError(f"rope is {config.rope}; wanted one with finite angles")
    return frequencies, attention_factor


def _frequencies(config: ModelConfig, max_model_len: int) -> tuple[Tensor, float]:
    rope, dim = config.rope, config.rotary_dim
    match rope.rope_type:
        case "default":
            return _default(rope.theta, dim), 1.0
        case "linear":
            return _default(rope.theta, dim) / _given(rope.factor), 1.0
        case "dynamic":
            return _default(_dynamic_theta(rope, dim, max_model_len), dim), 1.0
        case "llama3":
            return _llama3(rope, _default(rope.theta, dim)), 1.0
        case "yarn":
            return _yarn(rope, dim), _yarn_attention_factor(rope)
        case "longrope":
            return _longrope(rope, dim, max_model_len), _longrope_attention_factor(rope)
    raise UnsupportedError(f"rope_type {shown(rope.rope_type)} has no formula")


def _given(value: float | None) -> float:
    assert value is not None  # RopeConfig checks that each type has its fields
    return value


def _powers(theta: float, dim: int) -> Tensor:
    return theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _default(theta: float, dim: int) -> Tensor:
    return 1.0 / _powers(theta, dim)


def _dynamic_theta(rope: RopeConfig, dim: int, max_model_len: int) -> float:
    """NTK scaling for the longest sequence served: rescaling on the way would make cached keys wrong."""
    original, factor = _given(rope.original_max_position_embeddings), _given(rope.factor)
    length = max(max_model_len, original)
    stretch: float = ((factor * length / original) - (factor - 1)) ** (dim / (dim - 2))
    return rope.theta * stretch


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long wavelengths are slowed by `factor`, short ones kept, those between blended."""
    low, high, factor = _given(rope.low_freq_factor), _given(rope.high_freq_factor), _given(rope.factor)
    original = _given(rope.original_max_position_embeddings)
    wavelengths = 2 * math.pi / frequencies
    kept = (original / wavelengths - low) / (high - low)
    blended = (1 - kept) * frequencies / factor + kept * frequencies
    slowed = torch.where(wavelengths > original / low, frequencies / factor, blended)
    return torch.where(wavelengths < original / high, frequencies, slowed)


def llama3_divisors(rope: RopeConfig, dim: int) -> Tensor:
    """By how much llama3 scaling slows every pair [D/2]."""
    frequencies = _default(rope.theta, dim)
    return frequencies / _llama3(rope, frequencies)


def _yarn(rope: RopeConfig, dim: int) -> Tensor:
    """A ramp over dimensions from the trained frequencies to the slowed ones."""
    powers, factor = _powers(rope.theta, dim), _given(rope.factor)
    low, high = (_yarn_dimension(rope, dim, rotations) for rotations in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return (1.0 / (factor * powers)) * (1 - kept) + (1.0 / powers) * kept


def _yarn_dimension(rope: RopeConfig, dim: int, rotations: float) -> float:
    """The dimension whose angle makes this many turns within the trained context."""
    original = _given(rope.original_max_position_embeddings)
    return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    log_factor = math.log(_given(rope.factor))

    def magnitude(scale: float) -> float:
        return 0.1 * scale * log_factor + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def _longrope(rope: RopeConfig, dim: int, max_model_len: int) -> Tensor:
    """The divisors for the longest sequence served: changing them on the way would make cached keys wrong."""
    is_long = max_model_len > _given(rope.original_max_position_embeddings)
    divisors = rope.long_factor if is_long else rope.short_factor
    if len(divisors) != dim // 2:
        kind = "long_factor" if is_long else "short_factor"
        raise ConfigError(
            f"{kind} has {len(divisors)} numbers; wanted {dim // 2}, one for each pair of dimensions"
        )
    return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * _powers(rope.theta, dim))


def _longrope_attention_factor(rope: RopeConfig) -> float:
    factor = _given(rope.factor)
    if rope.attention_factor is not None:
        return rope.attention_factor
    if factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(_given(rope.original_max_position_embeddings)))
