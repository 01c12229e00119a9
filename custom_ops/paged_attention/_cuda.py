"""The CUDA kernels of lamina::paged_attention."""

import ctypes
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...common.errors import KernelLaunchError, ShapeError, UnsupportedError
from .._shared.build_cuda import load_cuda_kernel
from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.fp8 import FP8
from .._shared.registry import Provider
from ._plan import HOPPER, MANY, KernelShape, plan

LAYOUT = "38q3d2q"  # of struct PagedAttentionArguments, without the stream
MAX_HEAD_DIM = 256
HOPPER_HEAD_DIMS = (64, 128)
HOPPER_GROUP = 128  # heads a key-value head at most
LEAST_BLOCK = 64  # smaller blocks take TMA longer than the GEMMs take
FP8_SOURCE = "fp8"  # csrc/paged_attention/fp8.cu: a library of its own, built where it is used
HOPPER_READS_FP8 = True  # whether prefill over FP8 goes to Hopper's kernel, too: tests ask for the other one
FP8_QUERIES = frozenset({torch.bfloat16, torch.float16})
MAX_CACHE_BYTES = 1 << 36  # the kernels count the units of 16 bytes in 32 bits


@functools.cache
def find_fp8_kernel() -> CudaKernel:
    """Build or load the kernel over a cache in FP8, once."""
    return CudaKernel("paged_attention", LAYOUT, FP8_SOURCE)


def load() -> Callable[..., None]:
    """Build or load the kernel; the op's function on it."""
    kernel = CudaKernel("paged_attention", LAYOUT)  # struct PagedAttentionArguments

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
        launches = packed(
            FP8_SOURCE if is_fp8 else "cuda",
            _kernel_of_many_rows(query, key_cache, scale, soft_cap),
            out,
            query,
            key_cache,
            value_cache,
            block_tables,
            seq_lens,
            query_start_loc,
            max_query_len,
            scale,
            window,
            chunk,
            soft_cap,
            key_scale,
            value_scale,
            batch_invariant=batch_invariant,
        )
        run = find_fp8_kernel() if is_fp8 else kernel
        for fields in launches:
            run(query.device, *fields)

    return paged_attention


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
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    device, dtype = query.device, query.dtype
    launches = plan(
        _shapes(device, dtype, head_dim, source),
        group=num_heads // num_kv_heads,
        num_tokens=num_tokens,
        num_seqs=seq_lens.shape[0],
        num_kv_heads=num_kv_heads,
        max_query_len=max_query_len,
        capacity=block_tables.shape[1] * block_size,
        many=many,
        batch_invariant=batch_invariant,
    )
    tensors = (
        *(out.data_ptr(), *out.stride()[:2]),
        *(query.data_ptr(), *query.stride()[:2]),
        *(key_cache.data_ptr(), *key_cache.stride()[:3]),
        *(value_cache.data_ptr(), *value_cache.stride()[:3]),
        *(block_tables.data_ptr(), block_tables.stride(0)),
        *(seq_lens.data_ptr(), query_start_loc.data_ptr()),
        *(num_tokens, key_cache.shape[0], seq_lens.shape[0], num_heads, num_kv_heads),
        *(head_dim, block_size, window, chunk),
    )
    for launch in launches:
        workspace = _workspace(device, launch.workspace_floats, launch.num_counters)
        constants = scale * key_scale, soft_cap, value_scale, DTYPES[dtype], launch.kernel
        yield *tensors, *workspace, *launch.limits, *constants


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


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
