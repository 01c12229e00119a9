"""The CUDA kernels of lamina::paged_attention."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.fp8 import FP8
from .._shared.registry import Provider
from . import _fixed_splits, _rotating
from ._arguments import LAYOUT, check, packed
from ._plan import HOPPER, MANY
from ._rotating import RotatingDecode

HOPPER_HEAD_DIMS = (64, 128)
HOPPER_GROUP = 128  # heads a key-value head at most
LEAST_BLOCK = 64  # smaller blocks take TMA longer than the GEMMs take
FP8_SOURCE = "fp8"  # csrc/paged_attention/fp8.cu: a library of its own, built where it is used
HOPPER_READS_FP8 = True  # whether prefill over FP8 goes to Hopper's kernel, too: tests ask for the other one


@functools.cache
def find_fp8_kernel() -> CudaKernel:
    """Build or load the kernel over a cache in FP8, once."""
    return CudaKernel("paged_attention", LAYOUT, FP8_SOURCE)


def load() -> Callable[..., None]:
    """Build or load the kernel; the op's function on it."""
    kernel = CudaKernel("paged_attention", LAYOUT)

    def paged_attention(
        out: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        max_query_len: int,
        scale: float,
        window: int,
        chunk: int,
        soft_cap: float,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
        batch_invariant: bool = False,
    ) -> None:
        is_fp8 = key_cache.dtype == FP8
        check(out, query, key_cache, value_cache, block_tables)
        many = _kernel_of_many_rows(query, key_cache, scale, soft_cap)
        tensors = out, query, key_cache, value_cache, block_tables, seq_lens, query_start_loc
        masks = scale, window, chunk, soft_cap
        if batch_invariant and many == HOPPER and _fixed_splits.serves(query.dtype, key_cache.dtype):
            _fixed_splits.attend(*tensors, max_query_len, *masks)
            return
        run, source = (find_fp8_kernel(), FP8_SOURCE) if is_fp8 else (kernel, "cuda")
        for fields in packed(
            source,
            many,
            *tensors,
            max_query_len,
            *masks,
            key_scale,
            value_scale,
            batch_invariant=batch_invariant,
        ):
            run(query.device, *fields)

    return paged_attention


def _kernel_of_many_rows(query: Tensor, key_cache: Tensor, scale: float, soft_cap: float) -> int:
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    if soft_cap > 0 or scale <= 0 or query.shape[1] > HOPPER_GROUP * num_kv_heads:
        return MANY
    obstacle = hopper_obstacle(query.device, query.dtype, head_dim, block_size, key_cache.dtype == FP8)
    return HOPPER if obstacle is None else MANY


@functools.cache
def hopper_obstacle(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int, is_fp8: bool = False
) -> str | None:
    """Why the kernel of Hopper does not serve prefill on a GPU with these sizes; None: it does."""
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"compute capability is {capability[0]}.{capability[1]}, not 9.0"
    if dtype == torch.float32:
        return "it does not take float32"
    if is_fp8 and not HOPPER_READS_FP8:
        return "over FP8 it has run on no GPU yet"
    if head_dim not in HOPPER_HEAD_DIMS:
        return f"head_dim is {head_dim}, not one of {HOPPER_HEAD_DIMS}"
    if block_size < LEAST_BLOCK or block_size & (block_size - 1):
        return f"block_size is {block_size}, not a power of two from {LEAST_BLOCK} on"
    return None


def find_rotating(
    device: torch.device,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    *,
    batch_invariant: bool,
) -> RotatingDecode | None:
    """The kernel for decode that rotates as well, beside those of this provider; None where there is none."""
    if not batch_invariant:
        return _rotating.find(dtype, cache_dtype, head_dim)
    is_fixed = _fixed_splits.serves(dtype, cache_dtype)
    if not is_fixed or hopper_obstacle(device, dtype, head_dim, block_size) is not None:
        return None
    _fixed_splits.find_kernel()  # built now, not by the first step
    return RotatingDecode(attend=_fixed_splits.rotate_and_attend, holds=_fixed_splits.holds)


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
