"""The CUDA kernel of lamina::adjust_logits."""

from collections.abc import Callable

from torch import Tensor

from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.layout import moves_in_vectors
from .._shared.registry import Provider

WIDTH = 4  # ids that a lane moves at once


def load() -> Callable[..., None]:
    """Build or load the kernel; the op's function on it."""
    kernel = CudaKernel("adjust_logits", "32q")  # struct AdjustLogitsArguments

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
            logits.device,
            *(logits.data_ptr(), logits.stride(0), moves_in_vectors(logits, WIDTH), rows.data_ptr()),
            *(history.data_ptr(), history.shape[1], slots.data_ptr(), positions.data_ptr()),
            *(token_ids.data_ptr(), last_tokens.data_ptr(), num_prompt.data_ptr(), penalties.data_ptr()),
            *(bias_ids.data_ptr(), biases.data_ptr(), bias_ids.shape[1]),
            *(allowed.data_ptr(), allowed.shape[1]),
            *(bad_words.data_ptr(), bad_words.shape[1], bad_words.shape[2]),
            *(banned.data_ptr(), banned.shape[1], temperature.data_ptr()),
            *(out.data_ptr(), out.stride(0), moves_in_vectors(out, WIDTH)),
            *(chunks.data_ptr(), chunks.shape[1]),
            *(len(out), num_valid_ids, out.shape[1], DTYPES[logits.dtype]),
        )

    return adjust_logits


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
