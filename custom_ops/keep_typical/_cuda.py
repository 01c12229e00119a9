"""The CUDA kernel of lamina::keep_typical."""

from collections.abc import Callable

import torch
from torch import Tensor

from .._shared.cuda_kernel import DEVICES, CudaKernel
from .._shared.registry import Provider


def load() -> Callable[..., None]:
    """Build or load the kernel; the op's function on it."""
    kernel = CudaKernel("keep_typical", "6q")  # struct KeepTypicalArguments

    def keep_typical(logits: Tensor, temperature: Tensor, typical_p: Tensor) -> None:
        num_rows, vocab = logits.shape
        kernel(
            logits.device,
            *(logits.data_ptr(), temperature.data_ptr(), typical_p.data_ptr()),
            *(logits.stride(0), num_rows, vocab),
        )

    return keep_typical


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=frozenset({torch.float32}))
