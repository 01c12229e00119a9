"""The CUDA kernel of lamina::top_logprobs."""

from collections.abc import Callable

import torch
from torch import Tensor

from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.registry import Provider
from . import reference

THREADS = 1024  # csrc/top_logprobs/kernel.cuh has the same
MAX_CANDIDATES = 5500  # what shared memory has room for beside the sums


def load() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Build or load the kernel; the op's function on it, by the formula where num_top does not fit."""
    kernel = CudaKernel("top_logprobs", "10q")  # struct TopLogprobsArguments

    def top_logprobs(
        logits: Tensor, token_ids: Tensor, num_valid_ids: int, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not fits(num_valid_ids, num_top) or logits.stride(1) != 1:
            return reference.top_logprobs(logits, token_ids, num_valid_ids, num_top)
        num_rows, token_ids = len(logits), token_ids.contiguous()
        ids = token_ids.new_empty(num_rows, 1 + num_top)
        logprobs = logits.new_empty(num_rows, 1 + num_top, dtype=torch.float32)
        ranks = torch.empty_like(token_ids)
        kernel(
            logits.device,
            *(logits.data_ptr(), logits.stride(0), token_ids.data_ptr()),
            *(ids.data_ptr(), logprobs.data_ptr(), ranks.data_ptr()),
            *(num_rows, num_valid_ids, num_top, DTYPES[logits.dtype]),
        )
        return ids, logprobs, ranks

    return top_logprobs


def fits(num_valid_ids: int, num_top: int) -> bool:
    """Whether the kernel has room for all tokens that may be among the likeliest."""
    return num_top <= THREADS and num_top * -(-num_valid_ids // THREADS) <= MAX_CANDIDATES


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
