"""What a dialect of quantized checkpoints is, and what its readers share: refusals and names of modules."""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ....common.errors import ConfigError, UnsupportedError, shown
from ....common.patterns import PatternError, matches
from ...fields import Fields
from .formats import Format

FormatOf = Callable[[str], Format | None]
HEAD = "lm_head"
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """How the modules of a checkpoint lie, by its own config."""

    name: str  # as the config calls it
    format_of: FormatOf  # of a module by its name; None: as it would without quantization
    has_tied: bool = False  # whether it may hold a tied projection besides, kept otherwise
    notes: tuple[str, ...] = ()  # what is not done as the config says, in sentences


def refused(fields: Fields, name: str, value: Any, served: str) -> UnsupportedError:
    """What to raise for a value that is not served."""
    return UnsupportedError(
        f"{fields.origin}: {name} is {shown(value)}, which is not served; served is {served}"
    )


def require(fields: Fields, name: str, value: Any, served: Collection[Any]) -> None:
    """UnsupportedError for a value that is none of these."""
    if value not in served:
        raise refused(fields, name, value, " or ".join(map(repr, served)))


def static_scales(fields: Fields, name: str, value: str | None) -> tuple[str, ...]:
    """The note for activations whose scales the checkpoint fixes."""
    require(fields, name, value, (None, "dynamic", "static"))
    if value != "static":
        return ()
    return ("activations are quantized by scales of their own in place of the checkpoint's static ones",)


def aliases(module: str) -> tuple[str, ...]:
    """A module's name, and that of the fused one that it would be a part of."""
    parent, _, name = module.rpartition(".")
    return (module, f"{parent}.{FUSED[name]}") if name in FUSED else (module,)


def is_named(module: str, names: Sequence[str]) -> bool:
    """Whether transformers leaves a module alone for one of these names: by its beginning or its end."""
    return any(
        one.startswith(name) or one.endswith(name) or _matches(name, one)
        for name in names
        for one in aliases(module)
    )


def _matches(pattern: str, name: str) -> bool:
    try:
        return matches(pattern, name)
    except PatternError as error:
        raise ConfigError(f"{shown(pattern)} cannot be matched with modules: {error}") from error
    except re.error:
        return False


def matches_expression(fields: Fields, field: str, pattern: str, name: str) -> bool:
    """Whether a regular expression of the config matches the beginning of a name; ConfigError for none."""
    try:
        return matches(pattern, name)
    except re.error as error:
        raise fields.error(field, pattern, f"a regular expression ({error})") from error
