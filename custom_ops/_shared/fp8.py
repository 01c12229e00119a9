"""Activations in FP8 (e4m3): what their scales are, and how values and scales lie in memory."""

import functools

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .layout import moves_in_vectors

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of the type's finite values
NARROW = frozenset({torch.bfloat16, torch.float16})  # what CUDA kernels quantize
GROUP = 128  # neighbouring columns that share a scale, where a row has several


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor as what copies it takes it: of FP8, in which torch and GPUs copy little, its bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def group_of(scale: Tensor) -> int:
    """Columns that share a scale of the activations, by the scales of the weights: 0, all of a row."""
    return GROUP if scale.dim() == 2 else 0


@functools.cache
def has_fp8(device: torch.device) -> bool:
    """Whether a GPU's tensor cores multiply e4m3."""
    return torch.cuda.get_device_capability(device) >= (8, 9)


def divided(x: Tensor, divisor: float) -> Tensor:
    """x / divisor rounded once on every device; of a plain number a GPU's torch multiplies by the inverse."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def num_groups(columns: int) -> int:
    """Scales of a row in groups; the last group may be short."""
    return (columns + GROUP - 1) // GROUP


def new_quantized(x: Tensor, columns: int, group: int) -> tuple[Tensor, Tensor]:
    """Memory for rows like x's, of so many columns, in FP8, and for their scales.

    A group's scales are neighbours, as a kernel reads them: [T, groups] with strides (1, T).
    """
    values = x.new_empty((x.shape[0], columns), dtype=FP8)
    if not group:
        return values, x.new_empty((x.shape[0],), dtype=torch.float32)
    return values, x.new_empty((num_groups(columns), x.shape[0]), dtype=torch.float32).t()


def fits_vectors(most_columns: int, *rows: Tensor) -> bool:
    """Whether rows of 16 bits, no longer than that, can be read 8 at a time."""
    return all(part.shape[1] <= most_columns and moves_in_vectors(part, 8) for part in rows)


def check_group(op: str, group: int) -> None:
    """Refuse groups that no kernel has."""
    if group not in (0, GROUP):
        raise ShapeError(f"{op}: group is {group}; wanted 0, a scale a row, or {GROUP}")


def check_rows(op: str, name: str, x: Tensor) -> None:
    """Refuse what is no matrix of at least one column."""
    if x.dim() != 2 or x.shape[1] == 0:
        raise ShapeError(f"{op}: {name} is {list(x.shape)}; wanted [T, columns], of at least one column")


def check_weight(op: str, columns: int, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    """Refuse weights, scales and a bias that do not fit together, or rows of so many columns."""
    if weight.dim() != 2 or weight.shape[1] != columns:
        raise ShapeError(f"{op}: weight is {list(weight.shape)}; wanted [out, {columns}]")
    if weight.dtype != FP8 or scale.dtype != torch.float32:
        raise ShapeError(
            f"{op}: weight is {weight.dtype}, scale {scale.dtype}; wanted {FP8} and {torch.float32}"
        )
    rows = weight.shape[0]
    if list(scale.shape) not in ([rows], [rows, num_groups(columns)]):
        raise ShapeError(
            f"{op}: scale is {list(scale.shape)}; wanted [{rows}] or [{rows}, {num_groups(columns)}]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"{op}: bias is {list(bias.shape)}; wanted [{rows}]")
    if not weight.is_contiguous() or not scale.is_contiguous():
        raise ShapeError(f"{op}: wanted a contiguous weight and a contiguous scale")
