"""The quantized modules of a checkpoint: where each belongs in a model, and what its files must hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ....common.errors import LoadError, UnsupportedError
from ....custom_ops._shared.fp8 import LARGEST
from ...quantization.model_schemes import ModelSchemes
from ...quantization.scheme import KeptRows, Shape, stacked
from ...quantization.unquantized import UNQUANTIZED
from ...registry import ParameterSpec
from ...sharding import Run
from ..shards import Header
from .dialect import Dialect
from .formats import Expected, Format

WEIGHT = ".weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedModule:
    """Rows of a parameter from `start` onward, as they lie in a checkpoint."""

    name: str  # "model.layers.0.self_attn.q_proj"
    parameter: str
    start: int
    shape: Shape
    format: Format

    @property
    def source(self) -> str:
        """The weight in whose place it is."""
        return f"{self.name}{WEIGHT}"

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        """The names that each tensor of the format may have in the checkpoint."""
        keys = self.format.tensors(self.shape)
        return {key: tuple(f"{self.name}.{name}" for name in key.split("|")) for key in keys}

    def held(self, headers: Mapping[str, Header], origin: Path) -> dict[str, str]:
        """The name of each tensor that the checkpoint has, by what the format calls it.

        Raises LoadError for one that is missing, or has another shape or dtype than it must.
        """
        found = {}
        for key, expected in self.format.tensors(self.shape).items():
            names = [name for name in self.tensor_names()[key] if name in headers]
            if len(names) > 1:
                raise LoadError(f"{origin} holds both {names[0]} and {names[1]}; wanted one of them")
            if not names and expected.is_required:
                wanted = " or ".join(self.tensor_names()[key])
                raise LoadError(f"{origin} lacks {wanted}, which its config calls for ({self.format.name})")
            if names:
                self._check(names[0], headers[names[0]], expected, origin)
                found[key] = names[0]
        return found

    def _check(self, name: str, header: Header, expected: Expected, origin: Path) -> None:
        if header.dtype not in expected.dtypes:
            wanted = " or ".join(sorted(expected.dtypes))
            raise LoadError(
                f"{name} in {origin} has dtype {header.dtype}; {self.format.name} calls for {wanted}"
            )
        if expected.shapes and header.shape not in expected.shapes:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(expected.shapes))
            raise LoadError(
                f"{name} in {origin} has shape {list(header.shape)}; {self.format.name} calls for {wanted}"
            )

    def part(self, parts: Sequence[Tensor], run: Run, columns: tuple[int, int] | None) -> Sequence[Tensor]:
        """Of all its parts those of some rows, and of some columns of them: the first, and how many."""
        scheme = self.format.scheme
        names = scheme.tensors(self.shape, torch.float32)
        rows = [
            part if name in scheme.shared else part.narrow(0, run.start, run.num_rows)
            for name, part in zip(names, parts, strict=True)
        ]
        return rows if columns is None else scheme.columns_of(rows, self.shape[1], columns)

    def unpack(self, tensors: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """The parts of the format's scheme. LoadError, naming tensor or module, where they are damaged."""
        for key, tensor in tensors.items():
            if not _is_finite(tensor):
                raise LoadError(
                    f"{self.name}.{key} holds values that are not finite, or too large to be; download the "
                    "checkpoint again"
                )
        try:
            return self.format.unpack(tensors, self.shape)
        except LoadError as error:
            raise LoadError(f"{self.name} {error}") from error


def _is_finite(tensor: Tensor) -> bool:
    """Whether its numbers are, and if they are scales, so are those of e4m3 that they multiply."""
    if tensor.dtype == torch.float8_e4m3fn:
        return not bool(
            (tensor.view(torch.uint8).bitwise_and(127) == 127).any()
        )  # of which torch asks nothing
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1:
        return True
    return bool((tensor.to(torch.float32) * LARGEST).isfinite().all())


def quantized_modules(
    dialect: Dialect | None, specs: Mapping[str, ParameterSpec]
) -> tuple[QuantizedModule, ...]:
    """The modules of all projections that a checkpoint quantizes.

    A tied projection is one of them where the dialect holds it besides. UnsupportedError, naming the modules,
    where those of one parameter lie differently, or for a parameter that cannot be kept so.
    """
    if dialect is None:
        return ()
    modules: list[QuantizedModule] = []
    for parameter, spec in specs.items():
        if spec.projection and (spec.tied_to is None or dialect.has_tied):
            modules += _modules_of(dialect, parameter, spec)
    return tuple(modules)


def _modules_of(dialect: Dialect, parameter: str, spec: ParameterSpec) -> list[QuantizedModule]:
    start, modules, formats = 0, [], {}
    for source, shape in spec.source_shapes.items():
        name = source.removesuffix(WEIGHT)
        form = dialect.format_of(name)
        formats[name] = form
        if form is not None:
            modules.append(
                QuantizedModule(name=name, parameter=parameter, start=start, shape=shape, format=form)
            )
        start += shape[0]
    _check_alike(dialect, parameter, spec, formats)
    return modules


def _check_alike(
    dialect: Dialect, parameter: str, spec: ParameterSpec, formats: Mapping[str, Format | None]
) -> None:
    """UnsupportedError where no scheme keeps all modules of a parameter."""
    schemes = [UNQUANTIZED if form is None else form.scheme for form in formats.values()]
    try:
        stacked([KeptRows(*pair) for pair in zip(schemes, spec.source_rows, strict=True)])
    except UnsupportedError as error:
        kept = [
            f"{name} {'as it is' if form is None else form.scheme.kept}" for name, form in formats.items()
        ]
        raise UnsupportedError(
            f"{parameter} is one projection of {' and '.join(formats)}, which the {dialect.name} checkpoint "
            f"keeps differently: {', '.join(kept)}; wanted the same for all"
        ) from error


def own_schemes(
    dialect: Dialect | None, modules: Sequence[QuantizedModule], specs: Mapping[str, ParameterSpec]
) -> ModelSchemes:
    """The schemes that keep a checkpoint's own bytes. UnsupportedError for shapes that they cannot keep."""
    if dialect is None:
        return ModelSchemes(specs=specs)
    kept: dict[str, list[KeptRows]] = {}
    for one in modules:
        if not one.format.scheme.is_dense:
            kept.setdefault(one.parameter, []).append(KeptRows(one.format.scheme, one.shape[0]))
    schemes = {parameter: stacked(runs) for parameter, runs in kept.items()}
    notes = tuple(dialect.notes) if schemes else ()
    return ModelSchemes(
        specs=specs, schemes=schemes, name=dialect.name, notes=notes + _dequantized_notes(modules)
    )


def _dequantized_notes(modules: Sequence[QuantizedModule]) -> tuple[str, ...]:
    names: dict[str, list[str]] = {}
    for one in modules:
        if one.format.is_dequantized:
            names.setdefault(one.format.name, []).append(one.name)
    return tuple(
        f"{len(own)} modules in {name} are dequantized into the runtime's dtype as they are read"
        for name, own in names.items()
    )


def names_of_tensors(modules: Sequence[QuantizedModule]) -> set[str]:
    """Every name that a tensor of theirs may have."""
    return {name for one in modules for names in one.tensor_names().values() for name in names}


def names_replaced(modules: Sequence[QuantizedModule]) -> set[str]:
    """The weights in whose place they are."""
    return {one.source for one in modules}
