"""A projection as it is kept: its scheme, the tensors that stand for it, its scales, and its error."""

from collections.abc import Mapping
from dataclasses import dataclass

SCALE = "scale"  # the part whose numbers are told of


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationError:
    """How far what is kept of a tensor is from the checkpoint's weights."""

    relative_rms: float  # root of the mean square of the error, by that of the weights
    max_error: float  # the largest error of a weight, in the weights' own unit


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptProjection:
    """What is kept of one projection; scales and error are None before its weights are read."""

    scheme: str
    shape: tuple[int, ...]
    parts: Mapping[str, str]  # dtype and shape of each, by name; "" is the numbers
    scales: tuple[float, float] | None = None  # the smallest and the largest
    error: QuantizationError | None = None

    def description(self) -> str:
        """Format, scales and error in words that follow the projection's name."""
        names = [f"{name or 'numbers'} {part}" for name, part in self.parts.items()]
        said = [f"{list(self.shape)} {self.scheme}: {', '.join(names)}"]
        if self.scales is not None:
            said.append(f"scales from {self.scales[0]:.3g} to {self.scales[1]:.3g}")
        if self.error is not None and self.error.max_error:
            said.append(f"off by {self.error.relative_rms:.2%} rms, {self.error.max_error:.2e} at most")
        elif self.error is not None:
            said.append("as the checkpoint has it")
        return "; ".join(said)


def listed(projections: Mapping[str, KeptProjection]) -> list[str]:
    """A line a projection; those of all layers that are alike, before they are read, in one."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, one in projections.items():
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        alike.setdefault((name if one.error else kind, one.description()), []).append(name)
    return [
        f"  {names[0]}{f' to {names[-1]}' if len(names) > 1 else ''} {description}"
        for (_, description), names in alike.items()
    ]
