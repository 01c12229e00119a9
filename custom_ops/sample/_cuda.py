"""The CUDA kernels of lamina::sample."""

from collections.abc import Callable

from torch import Tensor

from ...common.errors import UnsupportedError
from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.layout import moves_in_vectors
from .._shared.registry import Provider
from .reference import CHUNK, num_chunks_of
from .workspace import workspace

MAX_CHUNKS = 2048  # what shared memory has room for beside the bins
VEC_BYTES = 16


def load() -> Callable[..., None]:
    """Build or load the kernel; the op's function on it."""
    kernel = CudaKernel("sample", "18q")  # struct SampleArguments

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
        row_indices: Tensor | None = None,
        chunks: Tensor | None = None,
    ) -> None:
        num_rows, num_chunks = len(logits), num_chunks_of(num_valid_ids)
        if num_chunks > MAX_CHUNKS:
            most = MAX_CHUNKS * CHUNK
            raise UnsupportedError(f"sample on cuda: num_valid_ids is {num_valid_ids}; wanted at most {most}")
        is_aligned = moves_in_vectors(logits, VEC_BYTES // logits.element_size())
        noted = workspace(logits.device, 2 * num_rows * num_chunks) if chunks is None else chunks
        kernel(
            logits.device,
            *(logits.data_ptr(), logits.stride(0)),
            *(temperature.data_ptr(), top_k.data_ptr(), top_p.data_ptr(), min_p.data_ptr()),
            *(seeds.data_ptr(), positions.data_ptr(), banned.data_ptr(), banned.shape[1]),
            *(
                0 if row_indices is None else row_indices.data_ptr(),
                noted.data_ptr(),
                chunks is not None,
                out.data_ptr(),
            ),
            *(num_rows, num_valid_ids, is_aligned, DTYPES[logits.dtype]),
        )

    return sample


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
