"""What adapter_config.json says of a LoRA adapter: which modules it changes, by which rank and factor."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...common.errors import ConfigError, UnsupportedError, shown
from ...common.patterns import matches, matches_whole
from ..fields import Fields, read_json

CONFIG_NAME = "adapter_config.json"
ALL_LINEAR = "all-linear"
MOST_ALPHA = 3.4028234663852886e38  # the largest number of float32
# What changes how an adapter computes and is not served, with what is.
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((False,), "false: weights of DoRA have a magnitude of their own; merge it into the model"),
    "modules_to_save": (([],), "none: whole modules of an adapter are not served; merge it into the model"),
    "bias": (("none",), '"none": biases of an adapter are not served'),
    "lora_bias": ((False,), "false: biases of an adapter are not served"),
    "layer_replication": (([],), "none: the layers of the model are those that it has"),
    "target_parameters": (([],), "none: only linear modules are adapted"),
    "trainable_token_indices": (([], {}), "none: embeddings of an adapter are not served"),
    "alora_invocation_tokens": (([],), "none: an adapter is there from the first token on"),
    "use_qalora": ((False,), "false: what it quantizes is not served"),
    "use_bdlora": (({},), "none: block-diagonal adapters are not served"),
}
CHANGED_BASES = ("pissa", "olora", "corda", "loftq")  # ways to begin that change the model's own weights, too


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftConfig:
    """A LoRA adapter's config, checked: what it does not say is what PEFT takes in its place."""

    rank: int
    alpha: float
    is_rank_stabilized: bool  # alpha by the root of the rank, not by the rank
    targets: str | tuple[str, ...]  # a pattern of whole names, ALL_LINEAR, or names and their ends
    excluded: str | tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    layers: tuple[int, ...] | None = None  # None: all
    layers_pattern: tuple[str, ...] = ()

    def targeted(self, modules: Iterable[str]) -> tuple[str, ...]:
        """Those of these modules that it changes, by PEFT's rules."""
        return tuple(module for module in modules if self._targets(module))

    def rank_of(self, module: str) -> int:
        """The rank of a module's matrices."""
        return self.rank_pattern.get(_pattern_of(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of a module's matrices is multiplied by."""
        alpha = self.alpha_pattern.get(_pattern_of(self.alpha_pattern, module), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def _targets(self, module: str) -> bool:
        if _names(self.excluded, module):
            return False
        if self.targets == ALL_LINEAR:
            return True
        if isinstance(self.targets, str) or module in self.targets:
            return _names(self.targets, module)
        return _names(self.targets, module) and self._is_in_layers(module)

    def _is_in_layers(self, module: str) -> bool:
        if self.layers is None:
            return True
        before = [rf"(?:^|.*\.){pattern}\." for pattern in self.layers_pattern] or [r".*\.[^.]*\."]
        for form in before:
            for number in re.findall(r"\.(\d+)(?=\.)", module):
                if _fits(matches, rf"{form}{number}\.", module):
                    return int(number) in self.layers
        return False


def read_peft_config(folder: Path) -> PeftConfig:
    """The config of an adapter's folder.

    Raises LoadError for a file that cannot be read, ConfigError for a value that it cannot have, and
    UnsupportedError, by its name, for what is not served.
    """
    fields = Fields(read_json(folder / CONFIG_NAME), str(folder / CONFIG_NAME))
    kind = fields.text("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedError(f"{fields.origin}: peft_type is {shown(kind)}; wanted 'LORA'")
    for name, (served, wanted) in REFUSED.items():
        value = fields.values.get(name)
        if value is not None and value not in served:
            raise UnsupportedError(f"{fields.origin}: {name} is {shown(value)}; wanted {wanted}")
    begun = fields.values.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(CHANGED_BASES):
        raise UnsupportedError(
            f"{fields.origin}: init_lora_weights is {shown(begun)}, which changes the model's own weights, "
            "too; save it with path_initial_model_for_weight_conversion, as PEFT calls it"
        )
    layers, pattern = (fields.values.get(name) for name in ("layers_to_transform", "layers_pattern"))
    config = PeftConfig(
        rank=fields.integer("r", 8),
        alpha=_alpha(fields),
        is_rank_stabilized=fields.boolean("use_rslora", False),
        targets=_one_or_many(fields, "target_modules"),
        excluded=_one_or_many(fields, "exclude_modules", ()),
        rank_pattern=_pattern(fields, "rank_pattern", whole=True),
        alpha_pattern=_pattern(fields, "alpha_pattern", whole=False),
        layers=_layers(fields, layers),
        layers_pattern=(pattern,) if pattern and isinstance(pattern, str) else fields.texts("layers_pattern"),
    )
    if config.layers is not None and isinstance(config.targets, str):
        raise fields.error("layers_to_transform", layers, "none where target_modules is a pattern")
    return config


def _alpha(fields: Fields) -> float:
    alpha: float = fields.number("lora_alpha", 8.0)
    if abs(alpha) > MOST_ALPHA:
        raise fields.error("lora_alpha", alpha, "a number that float32 holds")
    return alpha


def _layers(fields: Fields, value: Any) -> tuple[int, ...] | None:
    listed = [value] if isinstance(value, int) else value
    if listed is None or listed == []:
        return None
    if not isinstance(listed, list) or not all(type(index) is int for index in listed):
        raise fields.error("layers_to_transform", value, "a number of a layer, or a list of them")
    return tuple(listed)


def _one_or_many(fields: Fields, name: str, default: Any = None) -> str | tuple[str, ...]:
    value = fields.values.get(name)
    if value is None and default is not None:
        return ()
    if isinstance(value, str):
        _check_pattern(fields, name, value)
        return value
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return tuple(value)
    raise fields.error(name, value, "a list of names of modules, or a pattern")


def _pattern(fields: Fields, name: str, *, whole: bool) -> dict[str, Any]:
    found = fields.object(name)
    for key, value in found.items():
        _check_pattern(fields, name, key)
        is_right = type(value) is int or (not whole and type(value) is float)
        if not is_right or not (1 if whole else 0) <= value <= MOST_ALPHA:
            raise fields.error(
                name, found, f"{'integers >= 1' if whole else 'numbers >= 0'} by names of modules"
            )
    return found


def _check_pattern(fields: Fields, name: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError) as error:
        raise fields.error(name, pattern, f"a pattern ({error})") from error


def _names(names: str | tuple[str, ...], module: str) -> bool:
    """Whether a pattern is that of a module's whole name, or any of these its name or end."""
    if isinstance(names, str):
        return _fits(matches_whole, names, module)
    return any(module == name or module.endswith(f".{name}") for name in names)


def _pattern_of(patterns: Iterable[str], module: str) -> str:
    """The first pattern that is that of a module's name, or of its end; else the name."""
    return next((key for key in patterns if _fits(matches, rf"(.*\.)?({key})$", module)), module)


def _fits(how: Callable[[str, str], bool], pattern: str, module: str) -> bool:
    try:
        return how(pattern, module)
    except re.error as error:
        raise ConfigError(
            f"{CONFIG_NAME} has the pattern {shown(pattern)}: {error}; wanted another"
        ) from error
