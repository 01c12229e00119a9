"""What a model architecture is to Lamina, and the table of those that are known."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ..common.errors import ConfigError, LoadError, UnsupportedError, shown

if TYPE_CHECKING:
    from .config import ModelConfig
    from .fields import Fields
    from .layers import Attend, Ops

ENTRY_POINTS = "lamina.models"  # where installed packages offer definitions, each named by its architecture


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSpec:
    """One weight as the model wants it, and the checkpoint tensors that fill it.

    Its parts lie one below the other along dimension 0, `rows` of each (empty: as many parts as sources,
    equally long). `sources` are one tensor for each part, or one that holds all. A parameter with `tied_to`
    is that other one under a second name; its sources may be absent from the file.
    A `projection` is a matrix that the model gives to Ops.linear and to nothing else, so that it may be
    quantized; a `table` is one that it gives to Ops.embedding alone. `shard_axis` is the dimension along
    which ranks share it out, each part for itself: 0 where each computes some of the outputs, 1 where each
    sums over some of the inputs, None where each needs it whole. For one rank it changes nothing.
    """

    shape: tuple[int, ...]
    sources: tuple[str, ...]
    rows: tuple[int, ...] = ()
    tied_to: str | None = None
    projection: bool = False
    table: bool = False
    shard_axis: int | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError(
                f"ParameterSpec of shape {self.shape} has no sources; name at least one checkpoint tensor"
            )
        rows = self.part_rows
        if len(self.sources) not in (1, len(rows)) or sum(rows) != self.shape[0]:
            raise ConfigError(
                f"rows {rows} of {self.sources} do not add up to the {self.shape[0]} rows of the parameter"
            )
        if self.shard_axis is not None and self.shard_axis not in range(len(self.shape)):
            wanted = f"a dimension of shape {self.shape}, or None"
            raise ConfigError(f"shard_axis of {self.sources} is {shown(self.shard_axis)}; wanted {wanted}")

    @property
    def part_rows(self) -> tuple[int, ...]:
        """The rows of each part."""
        return self.rows or (self.shape[0] // len(self.sources),) * len(self.sources)

    @property
    def source_rows(self) -> tuple[int, ...]:
        """The rows each source fills."""
        return self.part_rows if len(self.sources) > 1 else self.shape[:1]

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
class AttentionSpec:
    """How the tokens of one layer see each other."""

    scale: float  # of query @ key
    window: int | None = None  # a token sees this many positions, the last being its own; None: all before it
    soft_cap: float | None = None  # scores become soft_cap * tanh(scores / soft_cap); None: they stay
    chunk: int | None = None  # positions are cut into so many each, and a token sees none of another's cut

    def __post_init__(self) -> None:
        if self.scale <= 0:
            raise ConfigError(f"the scale of attention is {self.scale}; wanted a number > 0")
        for name, limit in (("window", self.window), ("chunk", self.chunk)):
            if limit is not None and limit < 1:
                raise ConfigError(f"the {name} of attention is {limit}; wanted an integer >= 1 or None")
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ConfigError(f"the soft_cap of attention is {self.soft_cap}; wanted a number > 0 or None")

    @property
    def reach(self) -> int | None:
        """How many positions a token sees at most, its own included; None: all before it."""
        return min((limit for limit in (self.window, self.chunk) if limit is not None), default=None)


def attention_specs(config: "ModelConfig") -> tuple[AttentionSpec, ...]:
    """One for each layer, by the config's layer types, window, chunk, scale and soft cap."""
    return tuple(
        AttentionSpec(
            scale=config.attention_scale or config.head_dim**-0.5,
            window=config.sliding_window if kind == "sliding_attention" else None,
            chunk=config.attention_chunk_size if kind == "chunked_attention" else None,
            soft_cap=config.attention_soft_cap,
        )
        for kind in config.layer_kinds
    )


def no_fields_of_its_own(fields: "Fields") -> Mapping[str, Any]:
    """What LLaMA's config.json says is all that there is."""
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDefinition:
    """A model as pure functions of its config.

    `config` reads the fields of config.json that LLaMA's does not have, or means otherwise, and returns them
    as fields of ModelConfig; `defaults` is what the model's config.json means where it is silent.
    """

    parameters: Parameters
    forward: Forward
    logits: Logits
    attention: Callable[["ModelConfig"], tuple[AttentionSpec, ...]] = attention_specs
    config: Callable[["Fields"], Mapping[str, Any]] = no_fields_of_its_own
    defaults: Mapping[str, Any] = field(default_factory=dict)


_definitions: dict[str, ModelDefinition] = {}


def register_model(architecture: str, definition: ModelDefinition) -> None:
    """Make checkpoints that name this architecture loadable; ConfigError where the name means another."""
    _import_families()
    if _definitions.get(architecture, definition) != definition:
        raise ConfigError(f"architecture {shown(architecture)} is already registered with another definition")
    _definitions[architecture] = definition


def find_model(architecture: str) -> ModelDefinition:
    """The definition of an architecture: a registered one, that of an installed package, or one derived.

    Encoders (LlamaModel) and classifiers of sequences (LlamaForSequenceClassification) are derived from the
    model with an LM head. Raises UnsupportedError where there is none, naming those that there are;
    ConfigError where several packages offer one, and LoadError where it fails to import.
    """
    _import_families()
    if architecture in _definitions:
        return _definitions[architecture]
    if (derived := _derived(architecture)) is not None:
        return derived
    register_model(architecture, _from_package(architecture))
    return _definitions[architecture]


@lru_cache(maxsize=64)  # one object, so that definitions can be compared
def _derived(architecture: str) -> ModelDefinition | None:
    """The definition without an LM head of a model known with one, unless a package offers its own."""
    from .pooling.derived import causal_name, derived

    causal = causal_name(architecture)
    if causal is None or _offered(architecture) or not (causal in _definitions or _offered(causal)):
        return None
    return derived(architecture, find_model(causal))


def _offered(architecture: str) -> bool:
    return any(entry.name == architecture for entry in metadata.entry_points(group=ENTRY_POINTS))


def _import_families() -> None:
    """Have Lamina's own models registered, each of which does it itself."""
    import_module(".families", __package__)
    import_module(".heads", __package__)


def _from_package(architecture: str) -> ModelDefinition:
    """What an installed package offers under the entry point group lamina.models."""
    offered = metadata.entry_points(group=ENTRY_POINTS)
    found = list({entry.value: entry for entry in offered if entry.name == architecture}.values())
    if not found:
        known, name = sorted({*_definitions, *offered.names}), shown(architecture)
        raise UnsupportedError(
            f"architecture {name} is not known; known are {', '.join(known)}. "
            f"Add it with lamina.models.registry.register_model({name}, ModelDefinition(...)), "
            f"or install a package with an entry point of that name in the group {ENTRY_POINTS}"
        )
    if len(found) > 1:
        values = ", ".join(sorted(entry.value for entry in found))
        raise ConfigError(f"several packages offer {shown(architecture)}: {values}; uninstall all but one")
    try:
        definition = found[0].load()
    except (ImportError, AttributeError) as error:
        raise LoadError(
            f"{shown(architecture)} is offered by {found[0].value}, which fails: {error}"
        ) from error
    if not isinstance(definition, ModelDefinition):
        raise ConfigError(f"{found[0].value} is {type(definition).__name__}; wanted a ModelDefinition")
    return definition
