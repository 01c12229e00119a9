"""What a checkpoint is quantized to: the scheme, its groups, and the projections that stay as they are."""

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ...common.errors import ConfigError, shown
from ..quantization.w4a16 import GROUPS

SCHEMES = ("fp8", "int8", "w4a16")
GROUP_SIZES = (32, 64, 128, -1)
REGEX = "re:"  # before a pattern that is a regular expression, as in compressed-tensors' own lists


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How projections are written; ConfigError for what does not go together."""

    scheme: str
    """fp8 or int8, a scale a row and activations quantized as they come, or w4a16, four bits in groups."""

    group_size: int | None = None
    """Of w4a16: 32, 64 or 128 columns that share a scale, -1 for a whole row; None: the largest that fits."""

    symmetric: bool = True
    """Of w4a16: whether zero lies in the middle, or each group has a zero point of its own."""

    ignore: tuple[str, ...] = ()
    """Names of modules that stay as they are, with * and ?, or regular expressions behind "re:"."""

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise ConfigError(f"scheme is {shown(self.scheme)}; wanted one of {', '.join(SCHEMES)}")
        if self.group_size is not None:
            self._check_group_size(self.group_size)
        if not self.symmetric and self.scheme != "w4a16":
            raise ConfigError(
                f"symmetric is False and scheme is {self.scheme!r}; zero points are of scheme='w4a16' alone"
            )
        for pattern in self.ignore:
            _compiled(pattern)

    def _check_group_size(self, group_size: object) -> None:
        if isinstance(group_size, bool) or group_size not in GROUP_SIZES:
            wanted = ", ".join(map(str, GROUP_SIZES))
            raise ConfigError(f"group_size is {shown(group_size)}; wanted one of {wanted}")
        if self.scheme != "w4a16":
            raise ConfigError(
                f"group_size is {group_size} and scheme is {self.scheme!r}, which has a scale a row; "
                "leave it out, or use scheme='w4a16'"
            )

    @property
    def columns(self) -> int | None:
        """How many columns share a scale; None: a whole row."""
        if self.scheme != "w4a16" or self.group_size == -1:
            return None
        return self.group_size or GROUPS[4][0]

    def fitted(self, widths: Iterable[int]) -> "Recipe":
        """Returns the recipe for projections of so many columns: without a group size, with one that fits."""
        if self.scheme != "w4a16" or self.group_size is not None:
            return self
        fitting = fitting_group_sizes(widths)
        return replace(self, group_size=fitting[0]) if fitting else self

    def ignores(self, name: str) -> bool:
        """Whether a module stays as it is."""
        return any(_compiled(pattern).match(name) for pattern in self.ignore)

    def check_patterns(self, names: Sequence[str]) -> None:
        """Raise ConfigError for a pattern that is the name of no module."""
        for pattern in self.ignore:
            if not any(_compiled(pattern).match(name) for name in names):
                raise ConfigError(
                    f"ignore has {shown(pattern)}, which no projection is called; wanted a name such as "
                    f"{names[0] if names else 'lm_head'}, with * and ?, or re: and a regular expression"
                )


def fitting_group_sizes(widths: Iterable[int]) -> list[int]:
    """The sizes of groups, the largest first, that divide all of these numbers of columns."""
    known = [*widths]
    return [size for size in GROUPS[4] if not any(width % size for width in known)]


def _compiled(pattern: object) -> re.Pattern[str]:
    if not isinstance(pattern, str) or not pattern:
        raise ConfigError(f"ignore has {shown(pattern)}; wanted names of modules as text")
    expression = pattern.removeprefix(REGEX) if pattern.startswith(REGEX) else fnmatch.translate(pattern)
    try:
        return re.compile(expression)
    except re.error as error:
        raise ConfigError(f"ignore has {shown(pattern)}, which is no regular expression: {error}") from error
