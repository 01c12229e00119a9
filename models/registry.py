"""What a model architecture is to Lamina, and the table of those that are known."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ..common.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from .config import ModelConfig
    from .layers import Attend, Ops


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSpec:
    """One weight as the model wants it, and the checkpoint tensors that fill it.

    `sources` are laid one below the other along dimension 0, `rows` of each (empty: equally many). A
    parameter with `tied_to` is that other one under a second name; its sources may be absent from the file.
    """

    shape: tuple[int, ...]
    sources: tuple[str, ...]
    rows: tuple[int, ...] = ()
    tied_to: str | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError(
                f"ParameterSpec of shape {self.shape} has no sources; name at least one checkpoint tensor"
            )
        rows = self.source_rows
        if len(rows) != len(self.sources) or sum(rows) != self.shape[0]:
            raise ConfigError(
                f"rows {rows} of {self.sources} do not add up to the {self.shape[0]} rows of the parameter"
            )

    @property
    def source_rows(self) -> tuple[int, ...]:
        """The rows each source fills."""
        return self.rows or (self.shape[0] // len(self.sources),) * len(self.sources)

    @property
    def source_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape each checkpoint tensor must have."""
        return {
            name: (rows, *self.shape[1:]) for name, rows in zip(self.sources, self.source_rows, strict=True)
        }


class Parameters(Protocol):
    """Every weight of a model by name."""

    def __call__(self, config: "ModelConfig") -> Mapping[str, ParameterSpec]: ...


class Forward(Protocol):
    """Hidden states [T, H] after the final norm, of T tokens [T] int32 at positions [T] int32."""

    def __call__(
        self,
        config: "ModelConfig",
        weights: Mapping[str, Tensor],
        token_ids: Tensor,
        positions: Tensor,
        attend: "Attend",
        ops: "Ops",
    ) -> Tensor: ...


class Logits(Protocol):
    """Logits [n, vocab] of hidden states [n, H]."""

    def __call__(
        self, config: "ModelConfig", weights: Mapping[str, Tensor], hidden: Tensor, ops: "Ops"
    ) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDefinition:
    """A model as three pure functions of its config."""

    parameters: Parameters
    forward: Forward
    logits: Logits


_definitions: dict[str, ModelDefinition] = {}


def register_model(architecture: str, definition: ModelDefinition) -> None:
    """Make the checkpoints whose config.json names this architecture loadable."""
    if _definitions.get(architecture, definition) != definition:
        raise ConfigError(f"architecture {architecture!r} is already registered with another definition")
    _definitions[architecture] = definition


def find_model(architecture: str) -> ModelDefinition:
    """The definition registered for an architecture."""
    if architecture not in _definitions:
        raise UnsupportedError(
            f"architecture {architecture!r} is not known; known are {', '.join(sorted(_definitions))}. "
            f"Add it with lamina.models.registry.register_model({architecture!r}, ModelDefinition(...))"
        )
    return _definitions[architecture]
