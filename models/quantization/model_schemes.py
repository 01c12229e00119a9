"""Which scheme keeps each projection of a model: one for all, or as a checkpoint has it module by module."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ...common.errors import UnsupportedError
from ...custom_ops import all_reduce
from ..layers import Ops
from ..registry import ParameterSpec
from ..sharding import COLUMNS, Run, Sharding, Share
from .kept import KeptProjection
from .scheme import HEAD, QuantScheme, Shape, StoredWeight, TensorTable

FIRST = "first"  # the part that says which row of a table a rank's first one is
SEPARATOR = "%"  # between a projection's name and that of a part, which no parameter's name begins with


class ColumnsOfRank(NamedTuple):
    """A projection's columns of one rank; nothing but Ops.linear may meet one, which sums over all ranks."""

    weight: Tensor | StoredWeight  # [out, in / ranks]
    ranks: int


class RowsOfRank(NamedTuple):
    """A table's rows of one rank; nothing but Ops.embedding may meet one, which asks all ranks."""

    rows: Tensor
    first: Tensor  # int32 [1]: which row of the table the first one is
    ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSchemes:
    """The parameters of a model or one of its stages, and the scheme of each that is not in the dtype."""

    specs: Mapping[str, ParameterSpec]
    schemes: Mapping[str, QuantScheme] = field(default_factory=dict)  # by parameter, none of them dense
    name: str | None = None  # how the setting or the checkpoint calls it all
    sharding: Sharding | None = None  # where these are of one of several ranks or stages
    whole_schemes: Mapping[str, QuantScheme] = field(default_factory=dict)  # of the model that is shared out
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
        return table | {_part_name(name, FIRST): ((1,), torch.int32) for name in self._shared_tables()}

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
        is_asked_for = self.name in {scheme.name for scheme in self.schemes.values()}
        return "quantization=None or " if is_asked_for else ""

    def of_rank(self, sharding: Sharding) -> "ModelSchemes":
        """The same for ranks that have parts. UnsupportedError, naming the parameter, for what has none."""
        schemes = {}
        for name, scheme in self.schemes.items():
            (_, columns), own = self._shape(name), sharding.specs[name]
            try:
                is_cut = columns != own.shape[1]
                scheme = scheme.for_columns(columns, own.shape[1]) if is_cut else scheme
                schemes[name] = scheme.for_rows(own.part_rows)
            except UnsupportedError as error:
                raise UnsupportedError(f"{name}: {error}") from error
        return replace(
            self, specs=sharding.specs, schemes=schemes, sharding=sharding, whole_schemes=self.schemes
        )

    def of_stage(self, names: Container[str]) -> "ModelSchemes":
        """The same for a stage of a pipeline, which has these parameters alone."""
        return replace(
            self,
            specs={name: spec for name, spec in self.specs.items() if name in names},
            schemes={name: scheme for name, scheme in self.schemes.items() if name in names},
            sharding=self.sharding or Sharding(ranks=1, specs=self.specs, whole=self.specs),
            whole_schemes=self.whole_schemes or self.schemes,
        )

    @property
    def whole_specs(self) -> Mapping[str, ParameterSpec]:
        """The parameters of the whole model, whatever ranks share out of them."""
        return self.specs if self.sharding is None else self.sharding.whole

    def shares(self, rank: int) -> dict[str, Share]:
        """What is kept of each tensor of a checkpoint, by a rank where there are several, of every stage."""
        sharding = self.sharding or Sharding(ranks=1, specs=self.specs, whole=self.specs)
        found = [sharding.shares(name, rank) for name in sharding.specs]
        return {source: share for shares in found for source, share in shares.items()}

    def runs_of(self, parameter: str, rank: int) -> list[tuple[Run, tuple[int, int] | None]]:
        """What a rank keeps of a parameter that lies in one piece: runs of its rows, and columns of them."""
        sharding = self.sharding or Sharding(ranks=1, specs=self.specs, whole=self.specs)
        found, first = [], 0
        whole = sharding.whole[parameter]
        for source, share in sharding.shares(parameter, rank).items():
            found += [(run._replace(start=run.start + first), share.columns) for run in share.runs]
            first += whole.source_shapes[source][0]
        return found

    def join(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The weights by name as a model's forward takes them: parts joined, and what ranks share marked."""
        joined: dict[str, Any] = {
            name: StoredWeight(tuple([weights[part] for part in parts]), self.schemes[name])
            for name, parts in self._part_names().items()
        }
        if self.sharding is not None and self.sharding.ranks > 1:
            ranks = self.sharding.ranks
            for name, spec in self.specs.items():
                if spec.projection and spec.shard_axis == COLUMNS:
                    joined[name] = ColumnsOfRank(joined.get(name, weights[name]), ranks)
            for name in self._shared_tables():
                joined[name] = RowsOfRank(weights[name], weights[_part_name(name, FIRST)], ranks)
        return {**weights, **cast(Mapping[str, Tensor], joined)}

    def table_parts(self, name: str) -> tuple[str, ...]:
        """The names among the weights of what a table is made of, for others that read it by joined_table."""
        return (name, _part_name(name, FIRST)) if name in self._shared_tables() else (name,)

    def first_rows(self, rank: int) -> dict[str, int]:
        """By their names, the tensors that say which row of a table the first one of a rank is."""
        return {_part_name(name, FIRST): rank * self.specs[name].shape[0] for name in self._shared_tables()}

    def _shared_tables(self) -> list[str]:
        """The tables of which ranks have some rows each."""
        sharding = self.sharding
        if sharding is None:
            return []
        return [name for name, spec in self.specs.items() if spec.table and sharding.is_shared(name)]

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


def joined_table(parts: Sequence[Tensor], ranks: int) -> Tensor:
    """A table that another model's schemes keep, as a forward takes it; parts: as table_parts names them."""
    return parts[0] if len(parts) == 1 else cast(Tensor, RowsOfRank(parts[0], parts[1], ranks))


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
    schemes = dict.fromkeys(projections, scheme)
    if scheme.head is not None:
        schemes |= dict.fromkeys(HEAD & schemes.keys(), scheme.head)
    return ModelSchemes(specs=specs, schemes=schemes, name=scheme.name)


def with_stored_weights(ops: Ops) -> Ops:
    """The same operations, which take what a scheme keeps, too, and what is one rank's of several."""

    def multiplied(x: Tensor, weight: Tensor | StoredWeight, bias: Tensor | None) -> Tensor:
        if isinstance(weight, StoredWeight):
            multiply = weight.scheme.multiply
            assert multiply is not None
            return multiply(x, weight.parts, bias)
        return ops.linear(x, weight, bias)

    def linear(
        x: Tensor, weight: Tensor | StoredWeight | ColumnsOfRank, bias: Tensor | None = None, /
    ) -> Tensor:
        if not isinstance(weight, ColumnsOfRank):
            return multiplied(x, weight, bias)
        total = all_reduce(multiplied(x, weight.weight, None), weight.ranks)
        return total if bias is None else total + bias

    def embedding(token_ids: Tensor, table: Tensor | RowsOfRank) -> Tensor:
        if not isinstance(table, RowsOfRank):
            return ops.embedding(token_ids, table)
        own = token_ids - table.first
        is_own = (own >= 0) & (own < table.rows.shape[0])
        rows = ops.embedding(torch.where(is_own, own, 0), table.rows)
        return all_reduce(torch.where(is_own[:, None], rows, 0.0), table.ranks)

    return ops._replace(linear=linear, embedding=embedding)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _part_name(projection: str, part: str) -> str:
    return f"{projection}{SEPARATOR}{part}" if part else projection


def _num_elements(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
