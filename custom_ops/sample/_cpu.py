"""The C++ kernel of lamina::sample: one thread a row, histograms in place of a sort."""

from collections.abc import Callable

import torch
from torch import Tensor

from .._shared.cpu_kernel import DEVICES, DTYPES, CpuKernel
from .._shared.registry import Provider
from .row_indices import with_row_indices


def load() -> Callable[..., None]:
    """Build or load the kernel; the op's function on it."""
    kernel = CpuKernel("sample", "14q")  # struct SampleArguments

    def sample(
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        banned: Tensor,
        num_valid_ids: int,
        out: Tensor,
    ) -> None:
        kernel(
            logits.dtype,
            *(logits.data_ptr(), logits.stride(0), temperature.data_ptr(), top_k.data_ptr()),
            *(top_p.data_ptr(), min_p.data_ptr(), seeds.data_ptr(), positions.data_ptr()),
            *(banned.data_ptr(), banned.shape[1], out.data_ptr()),
            *(logits.shape[0], num_valid_ids, torch.get_num_threads()),
        )

    return with_row_indices(sample)


PROVIDER = Provider(name="cpu", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
