"""Every weight of a model in memory, filled as rows come in, and what keeping projections so costs."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...common.errors import LoadError, UnsupportedError
from ...common.pages import advise_huge_pages
from ..quantization.kept import SCALE, KeptProjection, QuantizationError
from ..quantization.model_schemes import SEPARATOR, ModelSchemes
from ..quantization.scheme import QuantScheme

CHUNK_ELEMENTS = 1 << 22  # of a projection that are worked on at once, in float32


@dataclass(slots=True)
class _Sums:
    error: float = 0.0  # of squares
    weight: float = 0.0
    max_error: float = 0.0

    def summary(self) -> QuantizationError:
        relative = math.sqrt(self.error / self.weight) if self.weight else 0.0
        return QuantizationError(relative_rms=relative, max_error=self.max_error)


class LoadedWeights:
    """Memory for every parameter, which takes rows in any order: projections become what their schemes keep.

    What is kept of a row depends on that row alone, and no more than a chunk of rows is ever held in a wider
    type. A tied parameter is the same tensor as the other, unless it is a projection that is kept otherwise.
    """

    def __init__(
        self,
        schemes: ModelSchemes,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        rank: int = 0,  # whose part they are, where schemes share them out
        placed: Collection[str] = (),  # parameters that a checkpoint has as they are kept
    ) -> None:
        specs, names = schemes.specs, schemes.schemes.keys()
        self.specs, self.dtype, self.device = specs, dtype, torch.device(device)
        self.schemes, self.rank = schemes, rank
        self._parts = {name: tuple(parts) for name, parts in schemes.tables(dtype).items()}
        self._tied = {specs[name].tied_to: name for name in names - set(placed) if specs[name].tied_to}
        own = {
            name: torch.empty(shape, dtype=kind, device=device)
            for name, (shape, kind) in schemes.own_tensors(dtype).items()
        }
        for tensor in own.values() if self.device.type == "cpu" else ():
            advise_huge_pages(tensor.data_ptr(), tensor.nbytes)  # all of them are read at every step
        ordered = {name: own[schemes.tied().get(name, name)] for name in specs}
        self.by_name: dict[str, Tensor] = {**ordered, **own}
        self.begin_again()

    def begin_again(self) -> None:
        """Be filled anew from the first row on, in the memory that is there; nothing measured counts."""
        # Of a checkpoint: "layers.0.k_scale", float32 [1] or [kv_heads].
        self.kv_scales: dict[str, Tensor] = {}
        self._sums: dict[str, _Sums] = {}
        self._placed: set[str] = set()
        self._scales: dict[str, tuple[float, float]] = {}  # of each projection that has some, once settled
        self.renew(self.schemes.schemes)

    def renew(self, parameters: Iterable[str]) -> None:
        """Have nothing that was measured of these projections count, which are filled anew."""
        self._sums |= {name: _Sums() for name in parameters}

    def kept_with(self, parameter: str) -> tuple[str, ...]:
        """The projections with a scheme that rows of a parameter fill: itself, and the one tied to it."""
        names = (parameter, self._tied.get(parameter))
        return tuple(name for name in names if name is not None and name in self._parts)

    def room(self, parameter: str, shape: tuple[int, ...]) -> Tensor:
        """Memory for a whole parameter, to be filled and taken: its own, where it is kept as it is."""
        if parameter not in self._parts and shape == self.specs[parameter].shape:
            return self.by_name[parameter]
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def fill_up(self, parameters: Iterable[str] | None = None) -> None:
        """For ranks: zeros in rows that stand for nothing, and the number of a table's first row.

        parameters: whose rows are to be seen to, before they are settled; None: all.
        """
        for name, first in self.schemes.first_rows(self.rank).items():
            self.by_name[name].fill_(first)
        for name in self.specs if parameters is None else parameters:
            num_rows = self.specs[name].shape[0]
            filled = max(run.to + run.num_rows for run, _ in self.schemes.runs_of(name, self.rank))
            if filled < num_rows:
                for part in self._own_parts(name):
                    part.narrow(0, filled, num_rows - filled).zero_()

    def _own_parts(self, parameter: str) -> Sequence[Tensor]:
        """The tensors that have a row for each of a parameter."""
        if parameter not in self._parts:
            return [self.by_name[parameter]]
        return self._rows_of_parts(parameter, 0, self.specs[parameter].shape[0])

    def rows(self, parameter: str, start: int, count: int) -> Tensor:
        """Rows of a parameter that is kept as it is."""
        return self.by_name[parameter].narrow(0, start, count)

    def take(self, parameter: str, start: int, rows: Tensor, columns: tuple[int, int] | None = None) -> None:
        """Fill rows of a parameter from `start` onward, and those of a projection that is tied to it.

        columns: the first of those that are kept of each row, and how many; None: all. A scheme is given
        whole rows. Raises LoadError where it cannot keep them.
        """
        if parameter not in self._parts:
            own = self.rows(parameter, start, rows.shape[0])
            rows = rows if columns is None else rows.narrow(1, *columns)
            if own.data_ptr() != rows.data_ptr():  # else they were filled where they belong, in room()
                own.copy_(rows)
        for name in self.kept_with(parameter):
            step = max(1, CHUNK_ELEMENTS // rows.shape[1])
            for first in range(0, rows.shape[0], step):
                self._store(name, start + first, rows[first : first + step], columns)

    def place(self, parameter: str, start: int, count: int, given: Sequence[Tensor]) -> None:
        """Fill the parts of `count` rows from `start` onward with those that a checkpoint has.

        Numbers stay as they are; scales are rounded to the dtype of their part. Raises LoadError for those
        beyond it, UnsupportedError where a part that is the same for all rows differs from the one before.
        """
        scheme = self.schemes.schemes[parameter]
        parts = self._rows_of_parts(parameter, start, count)
        for name, part, values in zip(self._parts[parameter], parts, given, strict=True):
            if name in self._placed and not torch.equal(part, values.to(part)):
                raise UnsupportedError(
                    f"the columns of {parameter} are in one order for some of its rows and in another for "
                    "others (g_idx of the modules that are fused); wanted one order for all"
                )
            part.copy_(values)
            if part.dtype != values.dtype and not bool(part.isfinite().all()):
                raise LoadError(f"{parameter} has scales that are beyond {part.dtype}; use a wider dtype")
        self._placed |= self._shared(parameter)
        pairs = [pair for pair in zip(parts, given, strict=True) if pair[0].dtype != pair[1].dtype]
        if all(torch.equal(part.to(values.dtype), values) for part, values in pairs):
            return
        names, step = self._parts[parameter], max(1, CHUNK_ELEMENTS // self.specs[parameter].shape[1])
        for first in range(0, count, step):
            some = min(step, count - first)
            kept = self._rows_of_parts(parameter, start + first, some)
            meant = [
                values if name in self._shared(parameter) else values[first : first + step]
                for name, values in zip(names, given, strict=True)
            ]
            restore = scheme.of_rows(start + first, some).restore
            self._measure(parameter, restore(kept), restore(meant))

    def _shared(self, parameter: str) -> set[str]:
        """The parts of a projection that are the same for all of its rows."""
        return {f"{parameter}{SEPARATOR}{name}" for name in self.schemes.schemes[parameter].shared}

    def _rows_of_parts(self, parameter: str, start: int, count: int) -> Sequence[Tensor]:
        """The parts of some rows, those whole that are the same for all."""
        narrow = self.schemes.schemes[parameter].narrow
        if narrow is not None:
            return narrow([self.by_name[name] for name in self._parts[parameter]], start, count)
        shared = self._shared(parameter)
        return [
            self.by_name[name] if name in shared else self.by_name[name].narrow(0, start, count)
            for name in self._parts[parameter]
        ]

    def settle(self, parameters: Iterable[str] | None = None) -> None:
        """Lay projections out as their schemes multiply them, once every row is there and was measured.

        parameters: those alone; None: all with a scheme.
        """
        for name in self.schemes.schemes if parameters is None else parameters:
            scheme = self.schemes.schemes[name]
            scale = self.by_name.get(f"{name}{SEPARATOR}{SCALE}")
            if scale is not None:
                self._scales[name] = (float(scale.min()), float(scale.max()))
            if scheme.settle is not None:
                scheme.settle([self.by_name[part] for part in self._parts[name]])

    def _measure(self, name: str, kept: Tensor, wanted: Tensor) -> None:
        """Count how far rows as they are kept are from what they should be; changes `kept`."""
        off, sums = kept.sub_(wanted), self._sums[name]
        sums.max_error = max(sums.max_error, float(off.abs().max()))
        sums.error += float(off.square_().sum(dtype=torch.float64))
        sums.weight += float(wanted.square().sum(dtype=torch.float64))

    def _store(self, name: str, start: int, rows: Tensor, columns: tuple[int, int] | None) -> None:
        parts = self._rows_of_parts(name, start, rows.shape[0])
        wide = rows.to(self.device, torch.float32)
        scheme = self.schemes.schemes[name].of_rows(start, rows.shape[0])
        try:
            if columns is None:
                scheme.store(wide, parts)
            else:
                self._store_columns(self.schemes.whole_schemes[name], wide, parts, columns)
        except LoadError as error:
            raise LoadError(f"{name} {error}") from error
        self._measure(name, scheme.restore(parts), wide if columns is None else wide.narrow(1, *columns))

    def _store_columns(
        self, scheme: QuantScheme, rows: Tensor, parts: Sequence[Tensor], columns: tuple[int, int]
    ) -> None:
        """What is kept of some columns of rows is what one rank alone would keep of them."""
        table = scheme.parts((rows.shape[0], rows.shape[1]), self.dtype).values()
        whole = [torch.empty(shape, dtype=kind, device=self.device) for shape, kind in table]
        scheme.store(rows, whole)
        for part, own in zip(parts, scheme.columns_of(whole, rows.shape[1], columns), strict=True):
            part.copy_(own)

    def errors(self) -> dict[str, QuantizationError]:
        """The error of every projection that is kept otherwise than the dtype has it."""
        return {name: sums.summary() for name, sums in self._sums.items()}

    def kept(self) -> dict[str, KeptProjection]:
        """What is kept of each projection with a scheme, with its scales and its error."""
        errors, planned = self.errors(), self.schemes.kept(self.dtype)
        return {
            name: replace(one, scales=self._scales.get(name), error=errors[name])
            for name, one in planned.items()
        }

    def total_error(self) -> QuantizationError:
        """The error of all of them together."""
        return _total(self._sums.values())

    def sentences(self) -> tuple[str, ...]:
        """What keeping projections so costs, a sentence a scheme: all together and the worst."""
        own = tuple(self._sentence(scheme, names) for scheme, names in self.schemes.by_scheme())
        return own + tuple(f"quantization {self.schemes.name}: {note}" for note in self.schemes.notes)

    def _sentence(self, scheme: QuantScheme, names: Sequence[str]) -> str:
        errors = {name: self._sums[name].summary() for name in names}
        worst = max(errors, key=lambda name: errors[name].relative_rms)
        subject = f"quantization {scheme.name}: {len(names)} projections {scheme.kept}"
        if not errors[worst].max_error:
            return f"{subject}, as the checkpoint has them"
        return (
            f"{subject}, off by "
            f"{_total(self._sums[name] for name in names).relative_rms:.2%} rms; the worst is {worst} with "
            f"{errors[worst].relative_rms:.2%}"
        )

    def stats(self) -> dict[str, Any] | None:
        """The same in figures, with the bytes of all parts; None where every weight is in the dtype."""
        if not self._parts:
            return None
        parts = [self.by_name[part] for names in self._parts.values() for part in names]
        return {
            "name": self.schemes.name,
            "schemes": self.schemes.facts()["schemes"],
            "bytes": sum(part.nbytes for part in parts),
            "total": asdict(self.total_error()),
            "tensors": {
                name: {
                    "scheme": self.schemes.schemes[name].name,
                    "scales": self._scales.get(name),
                    **asdict(error),
                }
                for name, error in self.errors().items()
            },
        }


def _total(all_sums: Iterable[_Sums]) -> QuantizationError:
    total = _Sums()
    for sums in all_sums:
        total.error += sums.error
        total.weight += sums.weight
        total.max_error = max(total.max_error, sums.max_error)
    return total.summary()
