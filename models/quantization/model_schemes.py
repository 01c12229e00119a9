"""Which scheme keeps each projection of a model: one for all, or as a checkpoint has it module by module."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from ...common.errors import UnsupportedError
from ..layers import Ops
from ..registry import ParameterSpec
from .kept import KeptProjection
from .scheme import QuantScheme, Shape, StoredWeight, TensorTable

SEPARATOR = "%"  # between a projection's name and that of a part, which no parameter's name begins with


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSchemes:
    """A model's parameters, and the scheme of each projection that is kept otherwise than in the dtype."""

    specs: Mapping[str, ParameterSpec]
    schemes: Mapping[str, QuantScheme] = field(default_factory=dict)  # by parameter, none of them dense
    name: str | None = None  # how the setting or the checkpoint calls it all
    notes: tuple[str, ...] = ()  # what a checkpoint asks for and is done otherwise, in sentences

    def tables(self, dtype: torch.dtype) -> dict[str, TensorTable]:
        """Of each projection with a scheme its parts, by their names among the weights."""
        return {
            name: {
                _part_name(name, part): one for part, one in scheme.parts(self._shape(name), dtype).items()
            }
            for name, scheme in self.schemes.items()
        }

    def parameter_table(self, dtype: torch.dtype) -> TensorTable:
        """Shape and dtype of every tensor among the weights: the parameters in order, then other parts."""
        table: TensorTable = {name: (spec.shape, dtype) for name, spec in self.specs.items()}
        for parts in self.tables(dtype).values():
            table |= parts
        return table

    def own_tensors(self, dtype: torch.dtype) -> TensorTable:
        """The same without those that are another parameter under a second name."""
        table = self.parameter_table(dtype)
        return {name: one for name, one in table.items() if name not in self.tied()}

    def tied(self) -> dict[str, str]:
        """The parameters that are another one's tensor, and which."""
        return {
            name: spec.tied_to
            for name, spec in self.specs.items()
            if spec.tied_to is not None and name not in self.schemes
        }

    def num_bytes(self, dtype: torch.dtype) -> int:
        """What all of them take in a runtime of that dtype."""
        return sum(_num_elements(shape) * kind.itemsize for shape, kind in self.own_tensors(dtype).values())

    def check(self, device: torch.device) -> None:
        """Raise UnsupportedError where the device cannot multiply, or a shape cannot be kept so."""
        self.tables(torch.float32)
        for name, scheme in self.schemes.items():
            scheme.check()
            if device.type not in scheme.devices:
                kernels = " and ".join(kind.upper() for kind in sorted(scheme.devices))
                raise UnsupportedError(
                    f"quantization of {name} is {scheme.name!r}, whose kernels are for {kernels}s, and "
                    f"device is {device.type!r}; use {self._instead()}device={min(scheme.devices)!r}"
                )

    def check_batch_invariant(self, device: torch.device) -> None:
        """Raise UnsupportedError where rows of a projection have other bits in other batches."""
        for name, scheme in self.schemes.items():
            if device.type not in scheme.batch_invariant:
                raise UnsupportedError(
                    f"quantization of {name} is {scheme.name!r} and batch_invariant True, but its kernels on "
                    f"{device.type} sum by the number of rows: use quantization=None, or leave the mode"
                )

    def _instead(self) -> str:
        """The first remedy for a device that cannot multiply: what the setting asks for can be left out."""
        is_asked_for = {self.name} == {scheme.name for scheme in self.schemes.values()}
        return "quantization=None or " if is_asked_for else ""

    def join(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The weights by name as a model's forward takes them, parts joined."""
        joined = {
            name: StoredWeight(tuple([weights[part] for part in parts]), self.schemes[name])
            for name, parts in self._part_names().items()
        }
        return {**weights, **cast(Mapping[str, Tensor], joined)}

    def restored(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What each parameter stands for, float32 where a scheme keeps it, by the names of its sources."""
        found: dict[str, Tensor] = {}
        for name, kept in self.join(weights).items():
            if name in self.specs:
                stored = cast(Tensor | StoredWeight, kept)
                rows = stored.restored() if isinstance(stored, StoredWeight) else stored
                shapes = self.specs[name].source_shapes
                parts = torch.split(rows, [shape[0] for shape in shapes.values()])
                found |= dict(zip(shapes, parts, strict=True))
        return found

    def sentences(self) -> tuple[str, ...]:
        """How projections are kept, a sentence a scheme, and which are not; empty where none is."""
        own = [f"{scheme.name}: {len(names)} projections {scheme.kept}" for scheme, names in self.by_scheme()]
        dense = [name for name, spec in self.specs.items() if spec.projection and name not in self.schemes]
        if own and dense:
            own.append(f"{len(dense)} projections in the runtime's dtype, {_few(dense)}")
        return tuple([f"quantization {one}" for one in (*own, *self.notes)])

    def kept(self, dtype: torch.dtype) -> dict[str, KeptProjection]:
        """What will be kept of each projection with a scheme, in a runtime of that dtype."""
        return {
            name: KeptProjection(
                scheme=scheme.name or "",
                shape=self._shape(name),
                parts={
                    part: f"{str(kind).removeprefix('torch.')} {list(shape)}"
                    for part, (shape, kind) in scheme.parts(self._shape(name), dtype).items()
                },
            )
            for name, scheme in self.schemes.items()
        }

    def facts(self) -> dict[str, Any]:
        """What of it decides how a model computes, as plain data: each scheme with its projections."""
        schemes = {f"{scheme.name}: {scheme.kept}": list(names) for scheme, names in self.by_scheme()}
        return {"name": self.name, "schemes": schemes}

    def by_scheme(self) -> list[tuple[QuantScheme, tuple[str, ...]]]:
        """Each scheme with its projections."""
        return [
            (scheme, tuple(name for name, own in self.schemes.items() if own == scheme))
            for scheme in dict.fromkeys(self.schemes.values())
        ]

    def _part_names(self) -> dict[str, tuple[str, ...]]:
        return {name: tuple(parts) for name, parts in self.tables(torch.float32).items()}

    def _shape(self, name: str) -> Shape:
        return self.specs[name].shape


def uniform(scheme: QuantScheme, specs: Mapping[str, ParameterSpec]) -> ModelSchemes:
    """Every projection kept by one scheme, but for those that it exempts.

    Raises UnsupportedError where the model has nothing to keep so, ConfigError for a scheme amiss.
    """
    scheme.check()
    projections = [name for name, spec in specs.items() if spec.projection and name not in scheme.exempt]
    if scheme.is_dense:
        for name in projections:
            scheme.parts(specs[name].shape, torch.float32)
        return ModelSchemes(specs=specs, name=scheme.name)
    if not projections:
        raise UnsupportedError(
            f"quantization is {scheme.name!r}, but the model declares no projection; wanted at least one "
            "ParameterSpec(..., projection=True), or quantization=None"
        )
    return ModelSchemes(specs=specs, schemes=dict.fromkeys(projections, scheme), name=scheme.name)


def with_stored_weights(ops: Ops) -> Ops:
    """The same operations, whose linear takes what a scheme keeps, too."""

    def linear(x: Tensor, weight: Tensor | StoredWeight, bias: Tensor | None = None, /) -> Tensor:
        if isinstance(weight, StoredWeight):
            multiply = weight.scheme.multiply
            assert multiply is not None
            return multiply(x, weight.parts, bias)
        return ops.linear(x, weight, bias)

    return ops._replace(linear=linear)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _part_name(projection: str, part: str) -> str:
    return f"{projection}{SEPARATOR}{part}" if part else projection


def _num_elements(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
