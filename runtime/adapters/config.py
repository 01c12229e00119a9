"""How many LoRA adapters a runtime computes at once, and of what rank: checked when given."""

import re
from dataclasses import dataclass

from ...common.errors import ConfigError, UnknownSettingError, shown
from ...common.names import refuse_unknown
from ..validation import integer

MAX_LORAS, MAX_RANK, MAX_HELD = 256, 512, 4096
OTHER_NAMES = {
    "max_cpu_loras": "that is max_held here",
    "lora_dtype": "matrices have the dtype of the model",
    "max_adapters": "that is max_loras here",
}


@refuse_unknown(UnknownSettingError, OTHER_NAMES)
@dataclass(frozen=True, kw_only=True, slots=True)
class LoRAConfig:
    """Room for adapters, which is taken when the runtime starts. ConfigError for a value it cannot have."""

    max_loras: int = 4
    """Adapters that a step computes with at most: as many slots on the device."""
    max_lora_rank: int = 16
    """The largest rank of an adapter; matrices of a smaller one are padded by zeros."""
    max_held: int = 32
    """Adapters that the host's memory keeps at most; others are read again when they are asked for."""

    def __post_init__(self) -> None:
        for name, most in (("max_loras", MAX_LORAS), ("max_lora_rank", MAX_RANK), ("max_held", MAX_HELD)):
            value, wanted = getattr(self, name), f"1 to {most}"
            checked = integer(name, value, wanted, low=1, high=most, optional=False, error=ConfigError)
            object.__setattr__(self, name, checked)


def parse_lora(text: str) -> LoRAConfig:
    """The room as a command line names it: 8 slots, or 8:32 with the rank. ConfigError for anything else."""
    numbers = text.split(":")
    if len(numbers) > 2 or not all(re.fullmatch("[0-9]{1,9}", number) for number in numbers):
        raise ConfigError(f"lora is {shown(text)}; wanted a number of adapters, or with their rank, as 8:32")
    return LoRAConfig(**dict(zip(("max_loras", "max_lora_rank"), map(int, numbers), strict=False)))
