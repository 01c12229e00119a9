"""Rows of activations quantized to one byte an element: formats, scales, and how both lie in memory."""

import functools

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .fp8 import FP8
from .fp8 import LARGEST as LARGEST_FP8
from .layout import moves_in_vectors

INT8 = torch.int8
LARGEST = {FP8: LARGEST_FP8, INT8: 127.0}  # of a format; -128 is left out, so that signs cost the same error
CODES = {FP8: 0, INT8: 1}  # csrc/include/quantize.cuh has the same codes
FORMATS = frozenset(LARGEST)
NARROW = frozenset({torch.bfloat16, torch.float16})  # what CUDA kernels quantize
GROUP = 128  # neighbouring columns that share a scale, where a row has several


def group_of(scale: Tensor) -> int:
    """Columns that share a scale of the activations, by the scales of the weights: 0, all of a row."""
    return GROUP if scale.dim() == 2 else 0


@functools.cache
def has_tensor_cores(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a GPU's tensor cores multiply operands of a format."""
    return torch.cuda.get_device_capability(device) >= ((8, 9) if dtype == FP8 else (8, 0))


def num_groups(columns: int) -> int:
    """Scales of a row in groups; the last group may be short."""
    return (columns + GROUP - 1) // GROUP


def new_quantized(x: Tensor, columns: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory for rows like x's, of so many columns, in a format, and for their scales.

    A group's scales are neighbours, as a kernel reads them: [T, groups] with strides (1, T).
    """
    values = x.new_empty((x.shape[0], columns), dtype=dtype)
    if not group:
        return values, x.new_empty((x.shape[0],), dtype=torch.float32)
    return values, x.new_empty((num_groups(columns), x.shape[0]), dtype=torch.float32).t()


def fits_vectors(most_columns: int, *rows: Tensor) -> bool:
    """Whether rows of 16 bits, no longer than that, can be read 8 at a time."""
    return all(part.shape[1] <= most_columns and moves_in_vectors(part, 8) for part in rows)


def check_format(op: str, group: int, dtype: torch.dtype) -> None:
    """Refuse formats, and groups of columns in them, that no kernel has."""
    if dtype not in FORMATS:
        raise ShapeError(f"{op}: dtype is {dtype}; wanted {FP8} or {INT8}")
    if group not in ((0, GROUP) if dtype == FP8 else (0,)):
        groups = f" or {GROUP}" if dtype == FP8 else ""
        raise ShapeError(f"{op}: group is {group}; wanted 0, a scale a row{groups} in {dtype}")


def check_rows(op: str, name: str, x: Tensor) -> None:
    """Refuse what is no matrix of at least one column."""
    if x.dim() != 2 or x.shape[1] == 0:
        raise ShapeError(f"{op}: {name} is {list(x.shape)}; wanted [T, columns], of at least one column")


def check_weight(op: str, columns: int, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    """Refuse weights, scales and a bias that do not fit together, or rows of so many columns."""
    if weight.dim() != 2 or weight.shape[1] != columns:
        raise ShapeError(f"{op}: weight is {list(weight.shape)}; wanted [out, {columns}]")
    if weight.dtype not in FORMATS or scale.dtype != torch.float32:
        got = f"weight is {weight.dtype}, scale {scale.dtype}"
        raise ShapeError(f"{op}: {got}; wanted {FP8} or {INT8}, and {torch.float32}")
    rows = weight.shape[0]
    wanted = [[rows], [rows, num_groups(columns)]][: 1 if weight.dtype == INT8 else 2]
    if list(scale.shape) not in wanted:
        raise ShapeError(f"{op}: scale is {list(scale.shape)}; wanted {' or '.join(map(str, wanted))}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"{op}: bias is {list(bias.shape)}; wanted [{rows}]")
    if not weight.is_contiguous() or not scale.is_contiguous():
        raise ShapeError(f"{op}: wanted a contiguous weight and a contiguous scale")
