"""The CUDA kernel of lamina::rotary_embedding."""

from collections.abc import Callable

from torch import Tensor

from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.layout import with_dense_heads
from .._shared.registry import Provider


def load() -> Callable[..., tuple[Tensor, Tensor]]:
    """Build or load the kernel; the op's function on it."""
    kernel = CudaKernel("rotary_embedding", "15q")  # struct RotaryEmbeddingArguments

    def rotary_embedding(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        query_out, key_out = query.new_empty(query.shape), key.new_empty(key.shape)
        query, key = with_dense_heads(query), with_dense_heads(key)
        cos, sin = cos.contiguous(), sin.contiguous()
        num_tokens, num_heads, head_dim = query.shape
        kernel(
            query.device,
            *(query.data_ptr(), *query.stride()[:2]),
            *(key.data_ptr(), *key.stride()[:2]),
            *(cos.data_ptr(), sin.data_ptr(), query_out.data_ptr(), key_out.data_ptr()),
            *(num_tokens, num_heads, key.shape[1], head_dim, DTYPES[query.dtype]),
        )
        return query_out, key_out

    return rotary_embedding


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
