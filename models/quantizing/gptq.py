"""GPTQ (Frantar et al., 2022): each column is rounded, and later ones make up for what that is off by."""

import torch
from torch import Tensor

from ...common.errors import LoadError
from .grids import Fit, Grid

BLOCK = 128  # columns whose errors reach the columns behind them as one GEMM
DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it
MOST_TRIES = 4  # each with ten times the damping


def hessian_of(inputs: Tensor) -> Tensor:
    """The mean of x x^T [K, K] over inputs [T, K]: what an error of the weights costs in the outputs."""
    return inputs.T @ inputs / inputs.shape[0]


def codes_by_gptq(rows: Tensor, hessian: Tensor, grid: Grid, dtype: torch.dtype) -> tuple[Tensor, Fit]:
    """Codes [N, K] float32 of rows [N, K] float32 for inputs of this Hessian [K, K], and their scales.

    Scales are those of the rows as they were, and columns are taken by the size of their inputs, so that the
    largest errors have most columns left to make up for them. LoadError where there is no such thing as the
    inverse of the Hessian, which is where inputs are not finite.
    """
    fit = grid.fit(rows, dtype)
    order = hessian.diagonal().argsort(descending=True)
    factor = _factor_of_inverse(hessian[order][:, order])
    left = rows.T[order].contiguous()  # [K, N], a column of the weights after another
    codes = torch.empty_like(left)
    groups = [grid.group_of(column) for column in order.tolist()]
    for first in range(0, len(groups), BLOCK):
        last = min(first + BLOCK, len(groups))
        block = slice(first, last)
        errors = _round_block(left[block], codes[block], factor[block, block], groups[block], grid, fit)
        left[last:] -= factor[block, last:].T @ errors
    restored = torch.empty_like(codes)
    restored[order] = codes
    return restored.T.contiguous(), fit


def _round_block(
    left: Tensor, codes: Tensor, factor: Tensor, groups: list[int], grid: Grid, fit: Fit
) -> Tensor:
    """Fill codes [B, N] of columns [B, N], changing those to come; the errors [B, N] that they leave."""
    errors = torch.empty_like(left)
    for index, group in enumerate(groups):
        own = fit.of_group(group)
        codes[index] = grid.codes(left[index], own)
        errors[index] = (left[index] - grid.restore(codes[index], own)) / factor[index, index]
        left[index + 1 :] -= torch.outer(factor[index, index + 1 :], errors[index])
    return errors


def _factor_of_inverse(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor [K, K] of the damped Hessian's inverse."""
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1.0  # a column whose inputs were never seen: it is rounded as it is
    mean = float(diagonal.mean())
    identity = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    for tries in range(MOST_TRIES):
        damped = hessian + identity * (DAMPING * 10.0**tries * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            factor: Tensor
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(factor.isfinite().all()):
                return factor
    raise LoadError("has inputs on the calibration text that are not finite; GPTQ needs finite ones")
