"""The C++ kernel of lamina::lora."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.cpu_kernel import DEVICES, DTYPES, CpuKernel, by_rows
from .._shared.registry import Provider

MAX_PARTS = 4  # of a fused projection, as the kernel's arguments have room for


def padded(rows: Sequence[int]) -> list[int]:
    """The parts as both kernels take them, with zeros behind the last; ShapeError for too many."""
    if len(rows) > MAX_PARTS:
        raise ShapeError(f"lora: rows is {list(rows)}; wanted at most {MAX_PARTS} parts")
    return [*rows, *[0] * (MAX_PARTS - len(rows))]


def load() -> Callable[..., Tensor]:
    """Build or load the kernel; the op's function on it."""
    kernel = CpuKernel("lora", f"{14 + MAX_PARTS}q")  # struct LoraArguments

    def lora(
        y: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int]
    ) -> Tensor:
        parts = padded(rows)
        out, y, x = y.new_empty(y.shape), by_rows(y), by_rows(x)
        result = kernel(
            y.dtype,
            *(y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), a.data_ptr(), b.data_ptr()),
            *(scales.data_ptr(), slots.data_ptr(), out.data_ptr(), len(y), len(a)),
            *(x.shape[1], b.shape[2], torch.get_num_threads()),
            *parts,
        )
        if result >= 0:
            raise ShapeError(f"lora: slots[{result}] is {slots[result].item()}; wanted less than {len(a)}")
        return out

    return lora


PROVIDER = Provider(name="cpu", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
