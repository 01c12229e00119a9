"""The CUDA kernel of lamina::lora_silu_and_mul, on GPUs with clusters."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._shared.cpu_kernel import by_rows
from .._shared.cuda_kernel import DEVICES, CudaKernel
from .._shared.registry import Provider
from ..linear._cuda import check_capability
from ..lora._cuda import fields, is_for_clusters
from ._composed import lora_silu_and_mul as composed

NAME = "lora_silu_and_mul"
MOST_RANK = 40  # of gate and up: their sums take the shared memory of 80


def load() -> Callable[..., Tensor]:
    """Build or load the kernel; the op's function on it, or on the ops it stands for beyond its sizes."""
    check_capability(NAME)
    kernel = CudaKernel(NAME, "18q")  # struct LoraArguments

    def lora_silu_and_mul(
        y: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int]
    ) -> Tensor:
        y, x = by_rows(y), by_rows(x)
        is_pair = len(rows) == 2 and rows[0] == rows[1]
        if not is_pair or not is_for_clusters(x, a, b, MOST_RANK):
            return composed(y, x, a, b, scales, slots, rows)
        out = y.new_empty((len(y), rows[0]))
        kernel(y.device, *fields(y, x, a, b, scales, slots, rows, out))
        return out

    return lora_silu_and_mul


PROVIDER = Provider(
    name="cuda", load=load, devices=DEVICES, dtypes=frozenset({torch.bfloat16, torch.float16})
)
