"""The C++ kernel of lamina::linear_blocks."""

import array
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .._shared.cpu_kernel import DEVICES, DTYPES, CpuKernel, by_rows
from .._shared.registry import Provider
from .layout import KINDS
from .runs import Run, halves_in_groups, num_rows_of, runs_of


@functools.cache
def find_kernel() -> CpuKernel:
    """Build or load the kernel, once."""
    return CpuKernel("linear_blocks", "11q")  # struct LinearBlocksArguments


def load() -> Callable[..., Tensor]:
    """Build or load the kernel; the op's function on it."""
    find_kernel()
    return linear_blocks


def linear_blocks(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, silu_and_mul: bool = False
) -> Tensor:
    """The op, as op.py states it."""
    if silu_and_mul and not halves_in_groups(weight, kind):  # the rows that are gated begin amid a group
        gated: Tensor = torch.ops.lamina.silu_and_mul.default(linear_blocks(x, weight, bias, kind))
        return gated
    x = by_rows(x)
    num_tokens, columns, rows = *x.shape, num_rows_of(weight, kind)
    out = x.new_empty((num_tokens, rows // 2 if silu_and_mul else rows))
    bias = None if bias is None else bias.contiguous()
    runs = _run_fields(kind, rows)
    done = find_kernel()(
        x.dtype,
        *(x.data_ptr(), x.stride(0), weight.data_ptr(), 0 if bias is None else bias.data_ptr()),
        *(out.data_ptr(), runs.buffer_info()[0], len(runs) // 2),
        *(num_tokens, columns, silu_and_mul, torch.get_num_threads()),
    )
    assert done, f"kind {kind}"
    return out


@functools.cache  # and never dropped: calls of a CPU call graph go on reading them
def _run_fields(kind: str, num_rows: int) -> "array.array[int]":
    """Code and rows of each run, as struct BlockRun has them."""
    runs = runs_of(kind) or (Run(kind, num_rows),)
    return array.array("q", [field for run in runs for field in (KINDS[run.kind].code, run.num_rows)])


PROVIDER = Provider(name="cpu", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
