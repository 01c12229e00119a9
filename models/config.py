"""What a checkpoint's config.json and generation_config.json say, checked and in one shape."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from ..common.errors import ConfigError, LoadError, UnsupportedError
from ..common.logging import get_logger, log_once
from .fields import Fields, read_json
from .registry import find_model

logger = get_logger("models.config")

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}
ARCHITECTURE_OF_MODEL_TYPE = {"llama": "LlamaForCausalLM"}

# Fields that change the arithmetic in a way Lamina does not do, with the values that change nothing.
REFUSED_FIELDS: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "sliding_window": (),
    "partial_rotary_factor": (1, 1.0),
    "rope_interleaved": (False,),
    "residual_multiplier": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "attention_multiplier": (),
    "logits_scaling": (1, 1.0),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "num_local_experts": (0, 1),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """How positions turn into rotation angles; a field that its rope_type does not use is None."""

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise UnsupportedError(f"rope_type is {self.rope_type!r}; supported are {', '.join(ROPE_TYPES)}")
        if self.theta <= 0:
            raise ConfigError(f"rope_theta is {self.theta}; wanted a number > 0")
        for name in self._needed():
            if getattr(self, name) is None:
                raise ConfigError(f"rope_type {self.rope_type!r} needs {name}, which is missing")
        if self.factor is not None and self.factor < 1:
            raise ConfigError(f"rope factor is {self.factor}; wanted a number >= 1")
        if self.rope_type == "llama3" and not 0 < (self.low_freq_factor or 0) < (self.high_freq_factor or 0):
            got = f"{self.low_freq_factor} and {self.high_freq_factor}"
            raise ConfigError(f"low_freq_factor and high_freq_factor are {got}; wanted 0 < low < high")

    def _needed(self) -> tuple[str, ...]:
        return {
            "linear": ("factor",),
            "dynamic": ("factor", "original_max_position_embeddings"),
            "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
            "yarn": ("factor", "original_max_position_embeddings"),
        }.get(self.rope_type, ())


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The sizes and constants of a model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope: RopeConfig = RopeConfig()
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    dtype: torch.dtype = torch.float32
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; wanted an integer >= 1")
        if self.hidden_act != "silu":
            raise UnsupportedError(f"hidden_act is {self.hidden_act!r}; supported is 'silu'")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_key_value_heads is {self.num_kv_heads}; "
                f"wanted a divisor of num_attention_heads {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim is {self.head_dim}; wanted an even number, since rotary embedding turns pairs"
            )
        if self.dtype not in DTYPES.values():
            raise UnsupportedError(f"dtype is {self.dtype}; supported are {', '.join(DTYPES)}")

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, origin: str = "config.json") -> Self:
        """The config a config.json's content describes; whatever cannot be honoured is an error."""
        fields = Fields(raw, origin)
        architecture = _architecture(fields)
        find_model(architecture)
        _refuse_unsupported(fields)
        hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        if "head_dim" not in fields and hidden_size % num_heads:
            raise fields.error(
                "head_dim",
                None,
                f"a number, since num_attention_heads {num_heads} does not divide hidden_size {hidden_size}",
            )
        max_position_embeddings = fields.integer("max_position_embeddings", 2048)
        return cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_heads),
            head_dim=fields.integer("head_dim", hidden_size // num_heads),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            hidden_act=fields.text("hidden_act", "silu"),
            rope=_rope_config(fields, max_position_embeddings),
            max_position_embeddings=max_position_embeddings,
            attention_bias=fields.boolean("attention_bias", False),
            mlp_bias=fields.boolean("mlp_bias", False),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            dtype=_dtype(fields),
            bos_token_id=fields.integer("bos_token_id", None, minimum=0),
            eos_token_ids=fields.token_ids("eos_token_id"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """What a checkpoint's author wants for sampling; None where nothing is said."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


def read_model_config(folder: Path) -> ModelConfig:
    """The config of a checkpoint folder."""
    path = folder / "config.json"
    if not path.exists():
        raise LoadError(f"{folder} has no config.json; wanted a folder that holds a Hugging Face checkpoint")
    return ModelConfig.from_dict(read_json(path), origin=str(path))


def read_generation_config(folder: Path) -> GenerationDefaults:
    """The sampling defaults of a checkpoint folder, empty where it has none."""
    path = folder / "generation_config.json"
    if not path.exists():
        return GenerationDefaults()
    fields = Fields(read_json(path), str(path))
    return GenerationDefaults(
        eos_token_ids=fields.token_ids("eos_token_id"),
        temperature=fields.number("temperature", None),
        top_k=fields.integer("top_k", None, minimum=-1),
        top_p=fields.number("top_p", None, positive=True, maximum=1),
        min_p=fields.number("min_p", None, maximum=1),
    )


def _architecture(fields: Fields) -> str:
    names = fields.values.get("architectures") or [
        ARCHITECTURE_OF_MODEL_TYPE.get(fields.text("model_type", ""))
    ]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise fields.error(
            "architectures", fields.values.get("architectures"), 'a list such as ["LlamaForCausalLM"]'
        )
    return names[0]


def _refuse_unsupported(fields: Fields) -> None:
    for name, neutral in REFUSED_FIELDS.items():
        value = fields.values.get(name)
        if value is not None and value not in neutral:
            wanted = " or ".join(repr(v) for v in (None, *neutral[:1]))
            raise UnsupportedError(
                f"{fields.origin}: {name} is {value!r}, which Lamina does not do; supported is {wanted}"
            )


def _dtype(fields: Fields) -> torch.dtype:
    name = fields.text("dtype", None) or fields.text("torch_dtype", "float32")
    dtype = DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise fields.error("dtype", name, f"one of {', '.join(DTYPES)}")
    return dtype


def _rope_config(fields: Fields, max_position_embeddings: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before), which win."""
    scaling, parameters = fields.object("rope_scaling"), fields.object("rope_parameters")
    rope = Fields(
        scaling or parameters, f"{fields.origin}: {'rope_scaling' if scaling else 'rope_parameters'}"
    )
    theta_places = (rope, fields, Fields(parameters, fields.origin))
    theta_place = next((place for place in theta_places if "rope_theta" in place), fields)
    rope_type = _rope_type(rope)
    _refuse_unsupported(rope)
    original = _original_length(fields, rope, rope_type, max_position_embeddings)
    factor = max(max_position_embeddings / original, 1.0) if original and rope_type == "yarn" else None
    return RopeConfig(
        rope_type=rope_type,
        theta=theta_place.number("rope_theta", 10000.0, positive=True),
        factor=None if rope_type == "default" else rope.number("factor", factor, minimum=1),
        low_freq_factor=rope.number("low_freq_factor", None) if rope_type == "llama3" else None,
        high_freq_factor=rope.number("high_freq_factor", None) if rope_type == "llama3" else None,
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast", 32.0, positive=True),
        beta_slow=rope.number("beta_slow", 1.0, positive=True),
        attention_factor=rope.number("attention_factor", None) if rope_type == "yarn" else None,
        mscale=rope.number("mscale", None),
        mscale_all_dim=rope.number("mscale_all_dim", None),
        truncate=rope.boolean("truncate", True),
    )


def _original_length(
    fields: Fields, rope: Fields, rope_type: str, max_position_embeddings: int
) -> int | None:
    """The context a model was trained on before its rope was scaled, found where transformers finds it."""
    if rope_type == "dynamic":
        return max_position_embeddings
    if rope_type not in ("llama3", "yarn"):
        return None
    name = "original_max_position_embeddings"
    place = fields if name in fields else rope
    original: int = place.integer(name, max_position_embeddings)
    return original


def _rope_type(rope: Fields) -> str:
    """`rope_type`, or `type` as it was called before."""
    nested = sorted(name for name, value in rope.values.items() if isinstance(value, dict))
    if nested:
        raise UnsupportedError(
            f"{rope.origin} differs by layer type ({', '.join(nested)}), which Lamina does not do"
        )
    new, old = rope.text("rope_type", None), rope.text("type", None)
    if new and old and new != old:
        log_once(
            logger,
            logging.WARNING,
            f"{rope.origin} names rope_type {new!r} and type {old!r}; rope_type is used",
        )
    rope_type: str = new or old or "default"
    if rope_type not in ROPE_TYPES:
        raise UnsupportedError(
            f"{rope.origin}: rope_type is {rope_type!r}; supported are {', '.join(ROPE_TYPES)}"
        )
    return rope_type
