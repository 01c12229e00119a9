"""What a user may ask of the compiler."""

from dataclasses import dataclass
from typing import Literal

from ..common.errors import ConfigError

Numerics = Literal["fast", "exact"]
NUMERICS: tuple[Numerics, ...] = ("fast", "exact")

# The token dimension of every captured graph: a hint for the code generator, and the largest step.
TOKENS_HINT = 64
MAX_NUM_TOKENS = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileConfig:
    """Which passes run.

    passes: names out of compiler.passes.pipeline, which run in the order of the pipeline; None means all.
    """

    passes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        from .passes.pipeline import PASS_NAMES

        unknown = sorted(set(self.passes or ()) - set(PASS_NAMES))
        if unknown:
            raise ConfigError(f"passes names {unknown}; wanted names out of {list(PASS_NAMES)}")
