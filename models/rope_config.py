"""What config.json says of the rotary position embedding, in one shape for all its spellings."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..common.errors import ConfigError, UnsupportedError, shown
from ..common.logging import get_logger, log_once
from .fields import Fields

logger = get_logger("models.config")

# Fields that change the arithmetic in a way Lamina does not do, with the values that change nothing.
REFUSED_FIELDS: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1, 1.0),
    "rope_interleaved": (False,),
    "mrope_section": (),
}
# Fields that some rope_type uses, and that are passed over beside another.
KNOWN_FIELDS = {
    *("rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "attention_factor", "finetuned"),
    *("original_max_position_embeddings", *REFUSED_FIELDS),
}
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


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
    short_factor: tuple[float, ...] = ()  # divisors [rotated dimensions / 2] up to the original length
    long_factor: tuple[float, ...] = ()  # and beyond it
    rotated_share: float = 1.0  # of the dimensions of a head, the first ones

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise UnsupportedError(
                f"rope_type is {shown(self.rope_type)}; supported are {', '.join(ROPE_TYPES)}"
            )
        if not 0 < self.rotated_share <= 1:
            raise ConfigError(f"partial_rotary_factor is {self.rotated_share}; wanted above 0, at most 1")
        if self.theta <= 0:
            raise ConfigError(f"rope_theta is {self.theta}; wanted a number > 0")
        for name in self._needed():
            if getattr(self, name) is None:
                raise ConfigError(f"rope_type {shown(self.rope_type)} needs {name}, which is missing")
        if self.rope_type == "longrope" and not len(self.short_factor) == len(self.long_factor) > 0:
            got = f"short_factor has {len(self.short_factor)} numbers, long_factor {len(self.long_factor)}"
            raise ConfigError(f"{got}; wanted equally many, one for each pair of dimensions")
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
            "longrope": ("factor", "original_max_position_embeddings"),
        }.get(self.rope_type, ())


def read_rope(fields: Fields, *, partial: bool = False) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before), which win.

    `fields` are those of config.json, or an object that holds the same ones for some of the layers. Only of
    a model that can rotate a part of a head may the config ask for it: `partial`.
    """
    scaling, parameters = fields.object("rope_scaling"), fields.object("rope_parameters")
    rope = Fields(
        scaling or parameters, f"{fields.origin}: {'rope_scaling' if scaling else 'rope_parameters'}"
    )
    theta = fields.number("rope_theta", 10000.0, positive=True)
    theta = Fields(parameters, fields.origin).number("rope_theta", theta, positive=True)
    max_position_embeddings = fields.integer("max_position_embeddings", 2048)
    rope_type = _rope_type(rope)
    original = _original_length(fields, rope, rope_type, max_position_embeddings)
    by_length = original if rope_type in ("yarn", "longrope") else None
    factor = max(max_position_embeddings / by_length, 1.0) if by_length else None
    share = fields.number("partial_rotary_factor", 1.0) if partial else 1.0
    config = RopeConfig(
        rope_type=rope_type,
        theta=rope.number("rope_theta", theta, positive=True),
        factor=None if rope_type == "default" else rope.number("factor", factor, minimum=1),
        low_freq_factor=rope.number("low_freq_factor", None) if rope_type == "llama3" else None,
        high_freq_factor=rope.number("high_freq_factor", None) if rope_type == "llama3" else None,
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast", 32.0, positive=True),
        beta_slow=rope.number("beta_slow", 1.0, positive=True),
        attention_factor=rope.number("attention_factor", None) if by_length else None,
        mscale=rope.number("mscale", None),
        mscale_all_dim=rope.number("mscale_all_dim", None),
        truncate=rope.boolean("truncate", True),
        short_factor=rope.numbers("short_factor"),
        long_factor=rope.numbers("long_factor"),
        rotated_share=rope.number("partial_rotary_factor", share) if partial else 1.0,
    )
    refuse(rope, REFUSED_FIELDS)
    mention_unknown(rope, KNOWN_FIELDS)
    return config


def refuse(fields: Fields, refused: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise UnsupportedError for a refused field that nobody has read and that says more than nothing."""
    for name, value in fields.unread.items():
        if name in refused and value not in refused[name]:
            wanted = " or ".join(repr(v) for v in (None, *refused[name][:1]))
            raise UnsupportedError(
                f"{fields.origin}: {name} is {shown(value)}, which Lamina does not do; supported is {wanted}"
            )


def mention_unknown(fields: Fields, known: Collection[str]) -> None:
    """Say once which fields are passed over though nothing is known of them."""
    unknown = sorted(name for name in fields.unread if name not in known)
    if unknown:
        message = f"{fields.origin}: what Lamina does not know is passed over: {', '.join(unknown)}"
        log_once(logger, logging.WARNING, message)


def _original_length(
    fields: Fields, rope: Fields, rope_type: str, max_position_embeddings: int
) -> int | None:
    """The context a model was trained on before its rope was scaled, found where transformers finds it."""
    if rope_type == "dynamic":
        return max_position_embeddings
    if rope_type not in ("llama3", "yarn", "longrope"):
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
            f"{rope.origin} names rope_type {shown(new)} and type {shown(old)}; rope_type is used",
        )
    rope_type: str = new or old or "default"
    if rope_type not in ROPE_TYPES:
        raise UnsupportedError(
            f"{rope.origin}: rope_type is {shown(rope_type)}; supported are {', '.join(ROPE_TYPES)}"
        )
    return rope_type
