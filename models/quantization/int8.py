"""Projections in one byte a weight, made from a checkpoint's rows as they come in, and what this costs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...common.errors import LoadError, UnsupportedError
from ..layers import SCALE
from ..registry import ParameterSpec

Quantization = Literal["int8"]
QUANTIZATIONS: tuple[Quantization, ...] = ("int8",)
LARGEST = 127  # symmetric: -128 is left out, so that a weight and its negative cost the same error
CHUNK_ELEMENTS = 1 << 22  # that are worked on at once, in float32


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationError:
    """How far a tensor's bytes are from the checkpoint's weights."""

    relative_rms: float  # root of the mean square of the error, by that of the weights
    max_error: float  # the largest error of a weight, in the weights' own unit


@dataclass(slots=True)
class _Sums:
    error: float = 0.0  # of squares
    weight: float = 0.0
    max_error: float = 0.0

    def summary(self) -> QuantizationError:
        relative = math.sqrt(self.error / self.weight) if self.weight else 0.0
        return QuantizationError(relative_rms=relative, max_error=self.max_error)


def quantized_names(specs: Mapping[str, ParameterSpec]) -> tuple[str, ...]:
    """The parameters that quantization turns into bytes."""
    return tuple(name for name, spec in specs.items() if spec.projection)


def check_quantization(
    quantization: Quantization | None, specs: Mapping[str, ParameterSpec], device: torch.device
) -> None:
    """Raise UnsupportedError where the device has no kernels for it, or a model nothing to quantize."""
    if quantization is None:
        return
    if not quantized_names(specs):
        raise UnsupportedError(
            f"quantization is {quantization!r}, but the model declares no projection; wanted at least one "
            "ParameterSpec(..., projection=True), or quantization=None"
        )
    if device.type != "cpu":
        raise UnsupportedError(
            f"quantization is {quantization!r}, whose kernels are for CPUs, and device is {device.type!r}; "
            "use quantization=None or device='cpu'"
        )


class Int8Quantizer:
    """Each row of a projection as whole numbers from -127 to 127 and the scale that its largest weight gives.

    A row's bytes depend on that row alone, so the rows of a fused parameter may come in any order, and no
    more than a chunk of them is ever held in a wider type.
    """

    def __init__(self, specs: Mapping[str, ParameterSpec], device: torch.device | str) -> None:
        names = quantized_names(specs)
        self.weights: dict[str, Tensor] = {}
        for name in names:
            shape = specs[name].shape
            self.weights[name] = torch.empty(shape, dtype=torch.int8, device=device)
            self.weights[name + SCALE] = torch.empty(shape[:1], dtype=torch.float32, device=device)
        self._sums = {name: _Sums() for name in names}
        self._tied = {specs[name].tied_to: name for name in names if specs[name].tied_to}

    def take(self, parameter: str, start: int, rows: Tensor) -> None:
        """Quantize rows of a parameter from `start` onward where it, or what is tied to it, is a projection.

        Raises LoadError where they are not finite.
        """
        for name in (parameter, self._tied.get(parameter)):
            if name is not None and name in self._sums:
                step = max(1, CHUNK_ELEMENTS // rows.shape[1])
                for first in range(0, rows.shape[0], step):
                    self._fill(name, start + first, rows[first : first + step])

    def _fill(self, name: str, start: int, rows: Tensor) -> None:
        values = self.weights[name].narrow(0, start, rows.shape[0])
        scale = self.weights[name + SCALE].narrow(0, start, rows.shape[0])
        wide = rows.to(values.device, torch.float32)
        peak = wide.abs().amax(dim=1)
        if not bool(peak.isfinite().all()):
            raise LoadError(f"{name} holds weights that are not finite; quantization needs a largest one")
        scale.copy_(peak / LARGEST)
        steps = wide / torch.where(scale > 0, scale, 1.0)[:, None]
        values.copy_(steps.round_())
        error = torch.mul(values, scale[:, None], out=steps).sub_(wide)
        sums = self._sums[name]
        sums.max_error = max(sums.max_error, float(error.abs().max()))
        sums.error += float(error.square_().sum(dtype=torch.float64))
        sums.weight += float(wide.square().sum(dtype=torch.float64))

    def errors(self) -> dict[str, QuantizationError]:
        """The error of every parameter that was filled."""
        return {name: sums.summary() for name, sums in self._sums.items()}

    def sentence(self) -> str:
        """What the bytes cost, in words: all together, and the worst."""
        errors = self.errors()
        worst = max(errors, key=lambda name: errors[name].relative_rms)
        total = self.total_error()
        return (
            f"{len(errors)} projections in one byte a weight, off by {total.relative_rms:.2%} rms; "
            f"the worst is {worst} with {errors[worst].relative_rms:.2%}"
        )

    def total_error(self) -> QuantizationError:
        """The error of all of them together."""
        total = _Sums()
        for sums in self._sums.values():
            total.error += sums.error
            total.weight += sums.weight
            total.max_error = max(total.max_error, sums.max_error)
        return total.summary()
