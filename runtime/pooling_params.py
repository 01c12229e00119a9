"""What a prompt's hidden states become where a vector, classes or a score is wanted of it: plain data."""

from dataclasses import dataclass

from ..models.pooling.spec import Activation, Pooling


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingParams:
    """What the engine is asked for in place of tokens, with nothing left open."""

    pooling: Pooling
    dimensions: int | None = None  # a vector's first so many numbers; None: all
    normalize: bool = False  # whether it gets the length 1 then
    activation: Activation = "none"  # of classes or a score

    @property
    def reuses_prefix(self) -> bool:
        """Whether keys and values of the prompt's beginning suffice: of it no hidden state is wanted."""
        return self.pooling == "last"
