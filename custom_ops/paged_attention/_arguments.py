"""What the CUDA kernels of paged attention take: tensors as they must lie, packed for a launch."""

import ctypes
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...common.errors import KernelLaunchError, ShapeError, UnsupportedError
from .._shared.build_cuda import load_cuda_kernel
from .._shared.cuda_kernel import DTYPES
from .._shared.fp8 import FP8
from ._plan import KernelShape, Launch, plan

LAYOUT = "38q3d2q"  # of struct PagedAttentionArguments, without the stream
MAX_HEAD_DIM = 256
FP8_QUERIES = frozenset({torch.bfloat16, torch.float16})
MAX_CACHE_BYTES = 1 << 36  # the kernels count the units of 16 bytes in 32 bits


def packed(
    source: str,
    many: int,
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
    key_scale: float,
    value_scale: float,
    *,
    batch_invariant: bool = False,
) -> Iterator[tuple[float, ...]]:
    """The fields of struct PagedAttentionArguments for each launch of a call, the stream left out.

    source: of which library; many: which kernel serves many rows.
    """
    launches = plan(
        shapes_of(query, source),
        **sizes_of(query, key_cache, block_tables, seq_lens, max_query_len),
        many=many,
        batch_invariant=batch_invariant,
    )
    tensors = (out, query, key_cache, value_cache, block_tables, seq_lens, query_start_loc)
    constants = scale * key_scale, soft_cap, value_scale
    for launch in launches:
        yield packed_launch(launch, tensors, (window, chunk), constants)


def sizes_of(
    query: Tensor, key_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, max_query_len: int
) -> dict[str, int]:
    """What a plan of a call depends on."""
    num_tokens, num_heads, _ = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    return {
        "group": num_heads // num_kv_heads,
        "num_tokens": num_tokens,
        "num_seqs": seq_lens.shape[0],
        "num_kv_heads": num_kv_heads,
        "max_query_len": max_query_len,
        "capacity": block_tables.shape[1] * block_size,
    }


def packed_launch(
    launch: Launch,
    tensors: tuple[Tensor, ...],  # those of the op, in its order
    masks: tuple[int, int],  # window, chunk
    constants: tuple[float, float, float],  # the scale of scores, the soft cap, the scale of values
) -> tuple[float, ...]:
    """The fields of struct PagedAttentionArguments of one launch, the stream left out."""
    out, query, key_cache, value_cache, block_tables, seq_lens, query_start_loc = tensors
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    return (
        *(out.data_ptr(), *out.stride()[:2]),
        *(query.data_ptr(), *query.stride()[:2]),
        *(key_cache.data_ptr(), *key_cache.stride()[:3]),
        *(value_cache.data_ptr(), *value_cache.stride()[:3]),
        *(block_tables.data_ptr(), block_tables.stride(0)),
        *(seq_lens.data_ptr(), query_start_loc.data_ptr()),
        *(num_tokens, key_cache.shape[0], seq_lens.shape[0], num_heads, num_kv_heads),
        *(head_dim, block_size, *masks),
        *_workspace(query.device, launch.workspace_floats, launch.num_counters),
        *launch.limits,
        *(*constants, DTYPES[query.dtype], launch.kernel),
    )


def shapes_of(query: Tensor, source: str) -> Callable[[int], KernelShape]:
    """What kernels of a library are like that serve these queries: shape_of(kernel)."""
    return _shapes(query.device, query.dtype, query.shape[2], source)


@functools.cache
def _shapes(
    device: torch.device, dtype: torch.dtype, head_dim: int, source: str
) -> Callable[[int], KernelShape]:
    """shape_of(kernel) on a device; one function for equal arguments, so that plans can be remembered."""

    @functools.cache
    def shape_of(kernel: int) -> KernelShape:
        figures = [ctypes.c_int64() for _ in KernelShape._fields]
        references = [ctypes.byref(figure) for figure in figures]
        with torch.cuda.device(device):
            library = load_cuda_kernel("paged_attention", source)
            ask = library.paged_attention_shape
            error = ask(DTYPES[dtype], kernel, ctypes.c_int64(head_dim), *references)
        if error:
            raise KernelLaunchError(
                f"paged_attention: kernel {kernel} cannot run on {device}: CUDA error {error}"
            )
        return KernelShape(*(figure.value for figure in figures))

    return shape_of


@functools.cache
def fp8_obstacle(dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the kernels do not read a cache in FP8 beside queries of this kind; None: they do."""
    if dtype not in FP8_QUERIES:
        return f"{dtype} is not taken beside a cache in FP8; wanted bfloat16 or float16"
    if head_dim % 16:
        return f"head_dim is {head_dim}, of a cache in FP8; wanted a multiple of 16"
    return None


def check(out: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, tables: Tensor) -> None:
    head_dim, size, is_fp8 = query.shape[2], key_cache.element_size(), key_cache.dtype == FP8
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        wanted = f"a multiple of 8 up to {MAX_HEAD_DIM}"
        raise UnsupportedError(f"paged_attention on cuda: head_dim is {head_dim}; wanted {wanted}")
    if is_fp8 and (obstacle := fp8_obstacle(query.dtype, head_dim)):
        raise UnsupportedError(f"paged_attention on cuda: {obstacle}")
    check_rows(out, query, key_cache, value_cache)
    if tables.stride(1) != 1:
        raise ShapeError(
            f"paged_attention on cuda: block_tables has strides {tables.stride()}; wanted (…, 1)"
        )
    if max(cache.shape[0] * cache.stride(0) for cache in (key_cache, value_cache)) * size > MAX_CACHE_BYTES:
        raise UnsupportedError(f"paged_attention on cuda: a cache spans more than {MAX_CACHE_BYTES} bytes")


def check_rows(out: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, **others: Tensor) -> None:
    """Refuse rows that no kernel can load in units of 16 bytes."""
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    for name, tensor in ({"out": out, "query": query} | caches | others).items():
        strides, size = tensor.stride(), tensor.element_size()
        # or'ed together, the lowest bits show whether each is a multiple
        bits = tensor.data_ptr() | functools.reduce(int.__or__, strides[:-1]) * size
        if bits % 16 or strides[-1] != 1:
            got = f"{name} starts at {tensor.data_ptr():#x} with strides {strides}"
            raise ShapeError(
                f"paged_attention on cuda: {got}; wanted rows that start at multiples of 16 bytes"
            )


def _workspace(device: torch.device, floats: int, counters: int) -> tuple[int, int]:
    """Addresses of floats, and of zeros that each launch leaves as zeros; 0 where there are none."""
    return (
        _partials(device, _round_up(floats)).data_ptr() if floats else 0,
        _counters(device, _round_up(counters)).data_ptr() if counters else 0,
    )


def _round_up(count: int) -> int:
    return 1 << (count - 1).bit_length()


# Never freed, since captured graphs hold the addresses; shared by all calls, which one stream must order.
@functools.cache
def _partials(device: torch.device, size: int) -> Tensor:
    _refuse_capture()
    return torch.empty(size, dtype=torch.float32, device=device)


@functools.cache
def _counters(device: torch.device, size: int) -> Tensor:
    _refuse_capture()
    return torch.zeros(size, dtype=torch.int32, device=device)


def _refuse_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "paged_attention has no workspace of this size yet; run once before the capture"
        )
