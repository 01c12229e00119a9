"""What a quantization scheme is to Lamina, and the table of those that are known."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...common.errors import ConfigError, LoadError, UnsupportedError, shown

HEAD = frozenset({"lm_head"})
Shape = tuple[int, ...]
TensorTable = dict[str, tuple[Shape, torch.dtype]]
Parts = Sequence[Tensor]  # of one projection, in the order of QuantScheme.tensors


def store_one(rows: Tensor, parts: Parts) -> None:
    """The rows, rounded to the dtype of the one part."""
    parts[0].copy_(rows)


def restore_one(parts: Parts) -> Tensor:
    """The one part in float32."""
    return parts[0].to(torch.float32, copy=True)


def cut_numbers(parts: Parts, columns: int, first: int, count: int) -> Parts:
    """Columns of the numbers; the scale of a row is that of every part of it."""
    values, scale = parts
    return values.narrow(1, first, count), scale


def largest_of(rows: Tensor) -> Tensor:
    """The largest absolute weight of each row. LoadError where one is not finite."""
    peak = rows.abs().amax(dim=1)
    if not bool(peak.isfinite().all()):
        raise LoadError("holds weights that are not finite; quantization needs a largest one")
    return peak


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantScheme:
    """How a projection is stored, filled, multiplied and described; everything else asks it.

    `tensors(shape, dtype)` are the parts that stand for a projection [out, in] in a runtime of that dtype,
    the first by the name "", each with out as its first dimension unless it is `shared` or there are
    `runs`; it raises UnsupportedError for a shape that the scheme cannot keep. `store(rows, parts)` fills
    the parts of n rows [n, in] float32; it raises LoadError, in words that follow a parameter's name, for
    rows that cannot be kept. `restore(parts)` is what n rows stand for, [n, in] float32, in memory of its
    own.
    `multiply(x, parts, bias)` is x [T, in] @ weight.T + bias [out] in x's dtype; None: the one part is for
    Ops.linear, and tied parameters share it. `settle(parts)` lays whole parts out as `multiply` reads them
    on their device, once nothing else will be written to them; `filled(parts)` are the parts before that.
    Where ranks share out columns, `share(columns, count)` is the scheme that keeps so many of a row's,
    UnsupportedError where a block with one scale would be cut, and `cut(parts, columns, first, count)` makes
    its parts of those of whole rows.
    Where a checkpoint keeps the parts of a fused projection by several schemes, `stack(runs)` of any of them
    is the one that keeps all of its rows, UnsupportedError where there is none. That one has these as its
    `runs`, and `narrow(parts, start, count)` are the parts of some of its rows, as of_rows() keeps them.
    """

    name: str | None  # the value of the setting `quantization`
    kept: str  # how, in words that follow a number of projections
    devices: frozenset[str]  # types of those that can multiply
    tensors: Callable[[Shape, torch.dtype], Mapping[str, tuple[Shape, torch.dtype]]]
    store: Callable[[Tensor, Parts], None] = store_one
    restore: Callable[[Parts], Tensor] = restore_one
    multiply: Callable[[Tensor, Parts, Tensor | None], Tensor] | None = None
    op: str | None = None  # of lamina's, that multiply calls: its kernel is built ahead
    settle: Callable[[Parts], None] | None = None  # once all rows are filled, in place
    filled: Callable[[Parts], Parts] | None = None  # what was settled
    batch_invariant: frozenset[str] = frozenset()  # devices where a row's bits depend on no other row
    share: Callable[[int, int], "QuantScheme"] | None = None  # None: a row stays whole
    cut: Callable[[Parts, int, int, int], Parts] | None = None
    stack: "Callable[[tuple[KeptRows, ...]], QuantScheme] | None" = None  # None: beside no others
    runs: "tuple[KeptRows, ...]" = ()  # none: all rows are kept alike
    narrow: Callable[[Parts, int, int], Parts] | None = None
    shared: frozenset[str] = frozenset()  # parts that are the same for all rows of a projection
    exempt: frozenset[str] = frozenset()  # parameters left as they are where the setting asks for the scheme
    head: "QuantScheme | None" = (
        None  # keeps the LM head where the setting asks for the scheme; None: as others
    )

    @property
    def is_dense(self) -> bool:
        """Whether a projection is a tensor for Ops.linear, as it is without a scheme."""
        return self.multiply is None

    def parts(self, shape: Shape, dtype: torch.dtype) -> Mapping[str, tuple[Shape, torch.dtype]]:
        """What `tensors` says; ConfigError where rows cannot be stored and multiplied so."""
        parts = self.tensors(shape, dtype)
        own_rows = [own[:1] for name, (own, _) in parts.items() if name not in self.shared]
        by_rows = bool(self.runs) or all(rows == shape[:1] for rows in own_rows)
        is_right = next(iter(parts), None) == "" and by_rows
        if not is_right or (self.is_dense and parts != {"": (shape, dtype)}):
            wanted = '"" first, and as many rows in each'
            if self.is_dense:
                wanted = f'"" alone, of that shape in {dtype}, as there is no multiply'
            raise ConfigError(f"quantization {self.name!r} keeps {shape} as {dict(parts)}; wanted {wanted}")
        return parts

    def for_columns(self, columns: int, count: int) -> "QuantScheme":
        """The scheme that keeps `count` of a row's columns, in words of its own where it cannot."""
        if self.share is None:
            raise UnsupportedError(
                f"quantization is {self.name!r}, which keeps rows of {columns} columns whole, and ranks are "
                f"to have {count} each; wanted tensor_parallel 1, or a scheme with share and cut"
            )
        return self.share(columns, count)

    def for_rows(self, rows: Sequence[int]) -> "QuantScheme":
        """The scheme for a projection whose parts have so many rows each, in a rank's place."""
        if not self.runs:
            return self
        return stacked([run._replace(num_rows=count) for run, count in zip(self.runs, rows, strict=True)])

    def of_rows(self, start: int, count: int) -> "QuantScheme":
        """The scheme that keeps so many of the rows alone, from `start` onward."""
        if not self.runs:
            return self
        return stacked(rows_of_runs(self.runs, start, count))

    def columns_of(self, parts: Parts, columns: int, kept: tuple[int, int]) -> Parts:
        """The parts of some columns, the first and how many, of those of whole rows."""
        assert self.cut is not None, "a scheme that keeps rows whole"
        return self.cut(parts, columns, *kept)

    def check(self) -> None:
        """ConfigError where what it stores would be multiplied as every other weight is."""
        if (self.settle is None) != (self.filled is None):
            raise ConfigError(
                f"quantization {self.name!r} has one of settle and filled; wanted both, or none"
            )
        if self.is_dense and (self.store is not store_one or self.restore is not restore_one):
            raise ConfigError(
                f"quantization {self.name!r} has a store or a restore but no multiply; wanted multiply too, "
                "since without it projections are kept as every other weight is"
            )


class KeptRows(NamedTuple):
    """Rows that follow each other in a projection, and what keeps them."""

    scheme: QuantScheme
    num_rows: int


def stacked(runs: Sequence[KeptRows]) -> QuantScheme:
    """The scheme of a projection of these rows, one below the other. UnsupportedError where there is none."""
    schemes = list(dict.fromkeys(run.scheme for run in runs))
    if len(schemes) == 1:
        return schemes[0]
    stack = next((scheme.stack for scheme in schemes if scheme.stack is not None), None)
    if stack is None:
        kept = ", ".join(f"{run.num_rows} {run.scheme.kept}" for run in runs)
        raise UnsupportedError(f"rows are kept by several schemes, {kept}; wanted one for all")
    return stack(tuple(runs))


def rows_of_runs(runs: Sequence[KeptRows], start: int, count: int) -> list[KeptRows]:
    """The same of some of the rows, from `start` onward."""
    found, first = [], 0
    for run in runs:
        own = min(first + run.num_rows, start + count) - max(first, start)
        if own > 0:
            found.append(run._replace(num_rows=own))
        first += run.num_rows
    return found


class StoredWeight(NamedTuple):
    """A projection as its scheme keeps it; nothing but Ops.linear may meet one."""

    parts: tuple[Tensor, ...]
    scheme: QuantScheme

    def restored(self) -> Tensor:
        """What it stands for, [out, in] float32."""
        filled = self.scheme.filled
        return self.scheme.restore(self.parts if filled is None else filled(self.parts))


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
