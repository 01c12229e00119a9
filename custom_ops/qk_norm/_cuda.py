"""The CUDA kernel of lamina::qk_norm."""

from collections.abc import Callable

from torch import Tensor

from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.layout import with_dense_heads
from .._shared.registry import Provider


def load() -> Callable[..., tuple[Tensor, Tensor]]:
    """Build or load the kernel; the op's function on it."""
    kernel = CudaKernel("qk_norm", "14qd2q")  # struct QkNormArguments

    def qk_norm(
        query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, zero_centred: bool
    ) -> tuple[Tensor, Tensor]:
        query_out, key_out = query.new_empty(query.shape), key.new_empty(key.shape)
        query, key = with_dense_heads(query), with_dense_heads(key)
        query_weight, key_weight = query_weight.contiguous(), key_weight.contiguous()
        num_tokens, num_heads, head_dim = query.shape
        kernel(
            query.device,
            *(query.data_ptr(), *query.stride()[:2]),
            *(key.data_ptr(), *key.stride()[:2]),
            *(query_weight.data_ptr(), key_weight.data_ptr(), query_out.data_ptr(), key_out.data_ptr()),
            *(num_tokens, num_heads, key.shape[1], head_dim),
            *(eps, zero_centred, DTYPES[query.dtype]),
        )
        return query_out, key_out

    return qk_norm


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
