"""What a quantization scheme is to Lamina, and the table of those that are known."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ...common.errors import ConfigError, UnsupportedError, shown
from ..layers import Ops
from ..registry import ParameterSpec

Shape = tuple[int, ...]
TensorTable = dict[str, tuple[Shape, torch.dtype]]
Parts = Sequence[Tensor]  # of one projection, in the order of QuantScheme.tensors
SEPARATOR = "%"  # between a projection's name and that of a part, which no parameter's name begins with


class StoredWeight(NamedTuple):
    """A projection as its scheme keeps it; nothing but Ops.linear may meet one."""

    parts: tuple[Tensor, ...]


def store_one(rows: Tensor, parts: Parts) -> None:
    """The rows, rounded to the dtype of the one part."""
    parts[0].copy_(rows)


def restore_one(parts: Parts) -> Tensor:
    """The one part in float32."""
    return parts[0].to(torch.float32, copy=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantScheme:
    """How projections are stored, filled, multiplied, counted and described; everything else asks it.

    `tensors(shape, dtype)` are the parts that stand for a projection [out, in] in a runtime of that dtype,
    the first by the name "", each with out as its first dimension; it raises UnsupportedError for a shape
    that the scheme cannot keep. `store(rows, parts)` fills the parts of n rows [n, in] float32; it raises
    LoadError, in words that follow a parameter's name, for rows that cannot be kept. `restore(parts)` is what
    n rows stand for, [n, in] float32, in memory of its own. `multiply(x, parts, bias)` is
    x [T, in] @ weight.T + bias [out] in x's dtype; None: the one part is for Ops.linear, and tied parameters
    share it.
    """

    name: str | None  # the value of the setting `quantization`
    kept: str  # how, in words that follow a number of projections
    devices: frozenset[str]  # types of those that can multiply
    tensors: Callable[[Shape, torch.dtype], Mapping[str, tuple[Shape, torch.dtype]]]
    weight_bytes: Callable[[int, torch.dtype], int]  # of so many weights, to the accuracy that sizing needs
    store: Callable[[Tensor, Parts], None] = store_one
    restore: Callable[[Parts], Tensor] = restore_one
    multiply: Callable[[Tensor, Parts, Tensor | None], Tensor] | None = None

    @property
    def is_dense(self) -> bool:
        """Whether a projection is a tensor for Ops.linear, as it is without a scheme."""
        return self.multiply is None

    def quantized(self, specs: Mapping[str, ParameterSpec]) -> tuple[str, ...]:
        """The parameters that are not what they are without a scheme, in the model's order."""
        return () if self.is_dense else tuple(name for name, spec in specs.items() if spec.projection)

    def check(self, specs: Mapping[str, ParameterSpec], device: torch.device) -> None:
        """Raise UnsupportedError where the device cannot multiply, or the model has nothing to keep so."""
        self.tables(specs, torch.float32)
        if self.is_dense:
            self._check_dense()
            return
        if not self.quantized(specs):
            raise UnsupportedError(
                f"quantization is {self.name!r}, but the model declares no projection; wanted at least one "
                "ParameterSpec(..., projection=True), or quantization=None"
            )
        if device.type not in self.devices:
            kernels = " and ".join(name.upper() for name in sorted(self.devices))
            raise UnsupportedError(
                f"quantization is {self.name!r}, whose kernels are for {kernels}s, and device is "
                f"{device.type!r}; use quantization=None or device={min(self.devices)!r}"
            )

    def _check_dense(self) -> None:
        if self.store is not store_one or self.restore is not restore_one:
            raise ConfigError(
                f"quantization {self.name!r} has a store or a restore but no multiply; wanted multiply too, "
                "since without it projections are kept as every other weight is"
            )

    def tables(self, specs: Mapping[str, ParameterSpec], dtype: torch.dtype) -> dict[str, TensorTable]:
        """Of each projection its parts, by their names among the weights. ConfigError for parts amiss."""
        return {
            name: {_part_name(name, part): one for part, one in self._parts(spec.shape, dtype).items()}
            for name, spec in specs.items()
            if spec.projection
        }

    def _parts(self, shape: Shape, dtype: torch.dtype) -> Mapping[str, tuple[Shape, torch.dtype]]:
        """What `tensors` says, if rows can be stored and multiplied so."""
        parts = self.tensors(shape, dtype)
        is_right = next(iter(parts), None) == "" and all(own[:1] == shape[:1] for own, _ in parts.values())
        if not is_right or (self.is_dense and parts != {"": (shape, dtype)}):
            wanted = '"" first, and as many rows in each'
            if self.is_dense:
                wanted = f'"" alone, of that shape in {dtype}, as there is no multiply'
            raise ConfigError(f"quantization {self.name!r} keeps {shape} as {dict(parts)}; wanted {wanted}")
        return parts

    def parameter_table(self, specs: Mapping[str, ParameterSpec], dtype: torch.dtype) -> TensorTable:
        """Shape and dtype of every tensor among the weights: the parameters in order, then other parts."""
        table: TensorTable = {name: (spec.shape, dtype) for name, spec in specs.items()}
        for parts in self.tables(specs, dtype).values():
            table |= parts
        return table

    def joiner(
        self, specs: Mapping[str, ParameterSpec]
    ) -> Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]:
        """A function from the weights by name to those that a model's forward takes, parts joined."""
        tables = self.tables(specs, torch.float32)
        parts_of = {name: tuple(tables[name]) for name in self.quantized(specs)}

        def join(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            joined = {
                name: StoredWeight(tuple([weights[part] for part in parts]))
                for name, parts in parts_of.items()
            }
            return {**weights, **cast(Mapping[str, Tensor], joined)}

        return join

    def ops(self, ops: Ops) -> Ops:
        """The same operations, whose linear takes what is kept by this scheme too."""
        multiply = self.multiply
        if multiply is None:
            return ops

        def linear(x: Tensor, weight: Tensor | StoredWeight, bias: Tensor | None = None, /) -> Tensor:
            if isinstance(weight, StoredWeight):
                return multiply(x, weight.parts, bias)
            return ops.linear(x, weight, bias)

        return ops._replace(linear=linear)


_schemes: dict[str | None, QuantScheme] = {}


def register_scheme(scheme: QuantScheme) -> None:
    """Make a scheme a value of the setting `quantization`; ConfigError where the name means another."""
    if _schemes.get(scheme.name, scheme) != scheme:
        raise ConfigError(f"quantization {shown(scheme.name)} is already registered with another scheme")
    _schemes[scheme.name] = scheme


def find_scheme(name: str | None) -> QuantScheme:
    """The scheme of that name. ConfigError, naming those that are known, where there is none."""
    if not isinstance(name, (str, type(None))) or name not in _schemes:
        raise ConfigError(f"quantization is {shown(name)}; wanted {' or '.join(['None', *scheme_names()])}")
    return _schemes[name]


def scheme_names() -> tuple[str, ...]:
    """The names of all schemes that are known, but for that of none."""
    return tuple(name for name in _schemes if name is not None)


def _part_name(projection: str, part: str) -> str:
    return f"{projection}{SEPARATOR}{part}" if part else projection
