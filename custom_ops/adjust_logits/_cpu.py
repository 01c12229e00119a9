"""The C++ kernel of lamina::adjust_logits: a thread a row."""

from collections.abc import Callable

import torch
from torch import Tensor

from .._shared.cpu_kernel import DEVICES, DTYPES, CpuKernel
from .._shared.registry import Provider
from .reference import summaries


def load() -> Callable[..., None]:
    """Build or load the kernel; the op's function on it."""
    kernel = CpuKernel("adjust_logits", "27q")  # struct AdjustLogitsArguments

    def adjust_logits(
        logits: Tensor,
        rows: Tensor,
        history: Tensor,
        slots: Tensor,
        positions: Tensor,
        token_ids: Tensor,
        last_tokens: Tensor,
        num_prompt: Tensor,
        penalties: Tensor,
        bias_ids: Tensor,
        biases: Tensor,
        allowed: Tensor,
        bad_words: Tensor,
        banned: Tensor,
        temperature: Tensor,
        num_valid_ids: int,
        out: Tensor,
        chunks: Tensor,
    ) -> None:
        kernel(
            logits.dtype,
            *(logits.data_ptr(), logits.stride(0), rows.data_ptr()),
            *(history.data_ptr(), history.shape[1], slots.data_ptr(), positions.data_ptr()),
            *(token_ids.data_ptr(), last_tokens.data_ptr(), num_prompt.data_ptr(), penalties.data_ptr()),
            *(bias_ids.data_ptr(), biases.data_ptr(), bias_ids.shape[1]),
            *(allowed.data_ptr(), allowed.shape[1]),
            *(bad_words.data_ptr(), bad_words.shape[1], bad_words.shape[2]),
            *(banned.data_ptr(), banned.shape[1]),
            *(out.data_ptr(), out.stride(0), len(out), num_valid_ids, out.shape[1]),
            torch.get_num_threads(),
        )
        if chunks.shape[1]:
            chunks.copy_(summaries(out[:, :num_valid_ids], temperature))

    return adjust_logits


PROVIDER = Provider(name="cpu", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
