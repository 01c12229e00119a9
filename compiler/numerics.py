"""How results are rounded, and the token dimension that every captured graph has."""

from typing import Literal

Numerics = Literal["fast", "exact"]
NUMERICS: tuple[Numerics, ...] = ("fast", "exact")

# The token dimension of every captured graph: a hint for the code generator, and the largest step.
TOKENS_HINT = 64
MAX_NUM_TOKENS = 8192
