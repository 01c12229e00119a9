"""How the layers of a model are shared out among stages of a pipeline, and which weights each needs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..common.errors import UnsupportedError
from .layers import FAST_OPS
from .registry import ModelDefinition
from .rope import rotation_shapes

if TYPE_CHECKING:
    from .config import ModelConfig

NUM_TOKENS = 2  # of the forward by which it is seen which weights are read where


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One of the stages of a model: whose attention it computes, and the parameters that it reads for that.

    It begins behind the attention of the layer before its first, and ends with that of its last: a cut there
    is one between pieces that the compiler makes anyway. The first stage embeds tokens, and the last one
    makes hidden states and logits.
    """

    index: int
    count: int
    layers: range
    parameters: frozenset[str]

    @property
    def is_last(self) -> bool:
        """Whether it samples."""
        return self.index + 1 == self.count


def stages_of(definition: ModelDefinition, config: "ModelConfig", count: int) -> tuple[Stage, ...]:
    """So many stages of a model, the first ones with a layer more where they are not equal.

    UnsupportedError where it has fewer layers, or calls them in another order.
    """
    layers = config.num_layers
    if count > layers:
        got = f"pipeline_parallel is {count}, and {config.architecture} has {layers} layers"
        raise UnsupportedError(f"{got}; wanted at most one stage a layer")
    specs = definition.parameters(config)
    read = _read_by_layer(definition, config) if count > 1 else [{*specs}] * (layers + 1)
    read[-1] |= specs.keys() - set[str]().union(*read)  # what the forward does not read makes logits
    bounds = [-(-layers * index // count) for index in range(count + 1)]
    found = []
    for index in range(count):
        own = range(bounds[index], bounds[index + 1])
        names = set[str]().union(*read[own.start : own.stop + (index + 1 == count)])
        names |= {tied for name in names if (tied := specs[name].tied_to) is not None}
        found.append(Stage(index=index, count=count, layers=own, parameters=frozenset(names)))
    return tuple(found)


def with_last_reading(stages: Sequence[Stage], names: Iterable[str]) -> tuple[Stage, ...]:
    """The same stages, the last of which reads these parameters, too."""
    if not stages:
        return ()
    last = replace(stages[-1], parameters=stages[-1].parameters | {*names})
    return (*stages[:-1], last)


def _read_by_layer(definition: ModelDefinition, config: "ModelConfig") -> list[set[str]]:
    """The weights that are read before the attention of each layer, and behind that of the last."""
    shapes = {name: spec.shape for name, spec in definition.parameters(config).items()}
    shapes |= rotation_shapes(config, config.max_position_embeddings)
    weights = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    found: list[set[str]] = [set()]

    def attend(layer: int, *tensors: Tensor) -> None:
        if layer != len(found) - 1:
            raise UnsupportedError(
                f"pipeline_parallel is above 1, and {config.architecture} calls attend with layer {layer} "
                f"where {len(found) - 1} comes next; wanted ascending layers, or one stage"
            )
        found.append(set())

    ids = torch.empty(NUM_TOKENS, dtype=torch.int32, device="meta")
    with _Reads(weights, lambda name: found[-1].add(name)):
        definition.forward(config, weights, ids, ids, attend, FAST_OPS)
    return [names & definition.parameters(config).keys() for names in found]


class _Reads(TorchFunctionMode):
    """Says of every weight that is given to a function of torch that it is read."""

    def __init__(self, weights: Mapping[str, Tensor], on_read: Callable[[str], None]) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in weights.items()}
        self._on_read = on_read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in _values((*args, *kwargs.values())):
            if id(value) in self._names:
                self._on_read(self._names[id(value)])
        return func(*args, **kwargs)


def _values(arguments: Any) -> Iterator[Any]:
    for value in arguments:
        if isinstance(value, (tuple, list)):
            yield from _values(value)
        else:
            yield value
