"""The values that a scheme's weights can have: what scale and zero point rows get, and how they round."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .recipe import Recipe


class Fit(NamedTuple):
    """Scale and zero point [n, G] float32 of n rows of G groups; no zero point where it is always 0."""

    scale: Tensor
    zero: Tensor | None

    def of_group(self, group: int) -> "Fit":
        """Those of one group, [n]."""
        return Fit(self.scale[:, group], None if self.zero is None else self.zero[:, group])


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Codes from `smallest` to `largest`, whole numbers or e4m3, which stand for (code - zero) * scale."""

    smallest: float
    largest: float
    divisor: float  # a group's largest weight, or its range, by this is its scale
    columns: int | None  # that share a scale; None: a whole row
    symmetric: bool
    is_whole: bool

    def fit(self, rows: Tensor, dtype: torch.dtype) -> Fit:
        """The scales that rows [n, K] float32 get, each a number of `dtype`, and their zero points."""
        groups = self._grouped(rows)
        if self.symmetric:
            return Fit(_rounded(groups.abs().amax(dim=2) / self.divisor, dtype), None)
        low, high = groups.amin(dim=2).clamp(max=0.0), groups.amax(dim=2).clamp(min=0.0)
        scale = _rounded((high - low) / self.divisor, dtype)
        zero = (self.smallest - low / scale).round_().clamp_(self.smallest, self.largest)
        return Fit(scale, zero)

    def codes(self, values: Tensor, fit: Fit) -> Tensor:
        """The code nearest to each value, as float32; `fit` is broadcast to the values."""
        codes = values / fit.scale
        if fit.zero is not None:
            codes += fit.zero
        if self.is_whole:
            return codes.round_().clamp_(self.smallest, self.largest)
        return codes.clamp_(self.smallest, self.largest).to(torch.float8_e4m3fn).float()

    def restore(self, codes: Tensor, fit: Fit) -> Tensor:
        """What codes stand for; `fit` is broadcast to them."""
        return (codes if fit.zero is None else codes - fit.zero) * fit.scale

    def codes_of_rows(self, rows: Tensor, fit: Fit) -> Tensor:
        """Codes [n, K] of rows, each group by its own scale."""
        return self.codes(self._grouped(rows), _beside_groups(fit)).flatten(1)

    def restore_rows(self, codes: Tensor, fit: Fit) -> Tensor:
        """What codes [n, K] of whole rows stand for."""
        return self.restore(self._grouped(codes), _beside_groups(fit)).flatten(1)

    def group_of(self, column: int) -> int:
        """The group that a column is in."""
        return 0 if self.columns is None else column // self.columns

    def _grouped(self, rows: Tensor) -> Tensor:
        return rows.reshape(len(rows), -1, self.columns or rows.shape[1])


def grid_of(recipe: Recipe) -> Grid:
    """The grid of a recipe's scheme."""
    columns, symmetric = recipe.columns, recipe.symmetric
    limits = {  # -128 is left out, so that a weight and its negative cost the same error
        "fp8": (-448.0, 448.0, 448.0),
        "int8": (-127.0, 127.0, 127.0),
        "w4a16": (-8.0, 7.0, 7.5 if symmetric else 15.0),
    }
    smallest, largest, divisor = limits[recipe.scheme]
    return Grid(
        smallest=smallest,
        largest=largest,
        divisor=divisor,
        columns=columns,
        symmetric=symmetric,
        is_whole=recipe.scheme != "fp8",
    )


def _rounded(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as `dtype` has them: what is written is what was divided by. None is zero."""
    facts = torch.finfo(dtype)
    least = facts.tiny * facts.eps if dtype == torch.float16 else facts.tiny
    return scale.to(dtype).float().clamp_(min=least)


def _beside_groups(fit: Fit) -> Fit:
    return Fit(fit.scale[:, :, None], None if fit.zero is None else fit.zero[:, :, None])
