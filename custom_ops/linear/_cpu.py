"""The C++ kernels of lamina::linear; the library's GEMM wherever that was faster."""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .._shared.cpu_kernel import DEVICES, DTYPES, CpuKernel
from .._shared.registry import Provider
from .choices import (
    BUCKETS,
    Choice,
    GemmConfig,
    Kind,
    Method,
    Site,
    bucket_of,
    cached_until_adopted,
    choose,
    device_name_of,
    name_of,
)

CPU = torch.device("cpu")
CODES = {Method.DOT: 0, Method.AMX: 1}  # csrc/include/gemm.h has the same
MANY = 32  # rows from which on a library's GEMM keeps to the registers better than dot products do


@functools.cache
def find_kernel() -> CpuKernel:
    """Build or load the kernel, once."""
    return CpuKernel("linear", "12q")  # struct LinearArguments


def load() -> Callable[..., Tensor]:
    """Build or load the kernel; the op's function on it."""
    find_kernel()
    return linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, batch_invariant: bool = False) -> Tensor:
    """The op, as op.py states it."""
    if batch_invariant:
        return launch(x, weight if weight.stride(1) == 1 else weight.contiguous(), bias, one_method(x.dtype))
    method = method_of("linear", x, weight)
    if method is None:  # torch 2.13 lets what lies beside narrow rows of bfloat16 into the result
        return F.linear(x.contiguous(), weight, bias)
    return launch(x, weight, bias, method)


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, method: Method) -> Tensor:
    """x @ weight.T + bias by a method that this CPU has, of weights whose rows are contiguous."""
    num_tokens, (rows, columns) = x.shape[0], weight.shape
    out = x.new_empty((num_tokens, rows))
    bias = None if bias is None else bias.contiguous()
    done = find_kernel()(
        x.dtype,
        *(x.data_ptr(), *x.stride(), weight.data_ptr(), weight.stride(0)),
        *(0 if bias is None else bias.data_ptr(), out.data_ptr()),
        *(num_tokens, rows, columns, CODES[method], torch.get_num_threads()),
    )
    assert done, f"{method} of {x.dtype}"
    return out


def methods(dtype: torch.dtype, num_tokens: int) -> tuple[Method, ...]:
    """The methods of this CPU that may be the fastest for so many rows, the likeliest first."""
    if dtype == torch.bfloat16 and _has_amx():
        return (Method.AMX, Method.DOT) if num_tokens == 1 else (Method.AMX,)
    return (Method.DOT,) if num_tokens <= MANY else ()


def ways(dtype: torch.dtype, num_tokens: int) -> tuple[Method | None, ...]:
    """What may serve so many rows, the likeliest first; None is the library.

    Its threads wait for one another at every GEMM, which a decode step beside other work cannot afford, and
    in float32 its sums of few rows depend on how many threads there are.
    """
    return (*methods(dtype, num_tokens), *((None,) if num_tokens > MANY else ()))


def choice_of(site: Site, dtype: torch.dtype) -> Choice:
    """What serves a site: what was measured, else the likeliest."""
    likeliest, *others = ways(dtype, site.num_tokens)
    if not others:
        return Choice(kernel=likeliest, reason="nothing else serves so many rows", is_measured=False)
    choice = choose(site, device_name_of(CPU, dtype))
    return choice if choice.is_measured else replace(choice, kernel=likeliest)


def one_method(dtype: torch.dtype) -> Method:
    """The method for every number of rows alike: either adds up a row's products in one order of its own."""
    return Method.AMX if dtype == torch.bfloat16 and _has_amx() else Method.DOT


def method_of(kind: Kind, x: Tensor, weight: Tensor) -> Method | None:
    """The method that serves these tensors; None where the library does."""
    if weight.stride(1) != 1:
        return None
    rows, columns = weight.shape
    return _method(kind, x.shape[0], rows, columns, x.dtype)


@cached_until_adopted
def _method(kind: Kind, num_tokens: int, rows: int, columns: int, dtype: torch.dtype) -> Method | None:
    """By measurement where there is one, else the likeliest; the same for any number of threads."""
    if 0 in (num_tokens, rows, columns):
        return None
    bucket = bucket_of(num_tokens) or BUCKETS[-1]
    site = Site(kind=kind, num_tokens=bucket, n=rows, k=columns, dtype=name_of(dtype))
    kernel = choice_of(site, dtype).kernel
    assert not isinstance(kernel, GemmConfig), "a configuration of GPUs"
    return kernel


@functools.cache
def _has_amx() -> bool:
    return bool(find_kernel().library.linear_has_amx())


PROVIDER = Provider(name="cpu", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
