"""The CUDA kernel of lamina::lora_add_rms_norm, on GPUs with clusters."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._shared.cpu_kernel import by_rows
from .._shared.cuda_kernel import DEVICES, CudaKernel
from .._shared.registry import Provider
from ..linear._cuda import check_capability
from ..lora._cuda import fields, is_for_clusters
from ._composed import lora_add_rms_norm as composed

NAME = "lora_add_rms_norm"
MOST_RANK = 64  # whose sums find room in shared memory
MOST_OUTPUTS = 8192  # of a row, which the blocks of a cluster hold


def load() -> Callable[..., tuple[Tensor, Tensor]]:
    """Build or load the kernel; the op's function on it, or on the ops it stands for beyond its sizes."""
    check_capability(NAME)
    kernel = CudaKernel(NAME, "4qd18q")  # struct LoraAddNormArguments

    def lora_add_rms_norm(
        y: Tensor,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        scales: Tensor,
        slots: Tensor,
        rows: Sequence[int],
        residual: Tensor,
        weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        y, x, residual, weight = by_rows(y), by_rows(x), by_rows(residual), weight.contiguous()
        if len(rows) != 1 or rows[0] > MOST_OUTPUTS or not is_for_clusters(x, a, b, MOST_RANK):
            return composed(y, x, a, b, scales, slots, rows, residual, weight, eps)
        out, total = y.new_empty(y.shape), y.new_empty(y.shape)
        kernel(
            y.device,
            *(residual.data_ptr(), weight.data_ptr(), total.data_ptr(), residual.stride(0), eps),
            *fields(y, x, a, b, scales, slots, rows, out),
        )
        return out, total

    return lora_add_rms_norm


PROVIDER = Provider(
    name="cuda", load=load, devices=DEVICES, dtypes=frozenset({torch.bfloat16, torch.float16})
)
