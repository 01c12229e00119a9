"""The CUDA kernel of lamina::propose_ngram."""

from collections.abc import Callable

from torch import Tensor

from .._shared.cuda_kernel import DEVICES, CudaKernel
from .._shared.registry import Provider


def load() -> Callable[..., None]:
    """Build or load the kernel; the op's function on it."""
    kernel = CudaKernel("propose_ngram", "11q")  # struct ProposeNgramArguments

    def propose_ngram(
        tokens: Tensor,
        block_tables: Tensor,
        num_computed: Tensor,
        newest: Tensor,
        min_ngram: int,
        max_ngram: int,
        out: Tensor,
    ) -> None:
        kernel(
            tokens.device,
            *(tokens.data_ptr(), tokens.shape[1]),
            *(block_tables.data_ptr(), block_tables.stride(0)),
            *(num_computed.data_ptr(), newest.data_ptr()),
            *(out.data_ptr(), *out.shape, min_ngram, max_ngram),
        )

    return propose_ngram


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES)
