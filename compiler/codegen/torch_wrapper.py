"""What generated wrapper code names of torch, by the full names that its source gives, without Inductor."""

import math
from typing import Any

import torch
from torch import Tensor

EXTERN_KERNELS = "torch._inductor.select_algorithm.extern_kernels"
GUARDS = "torch._C._dynamo.guards"
WRAPPER_NAMES = (
    "torch",
    "torch.device",
    "torch.empty_strided",
    "torch.ops.aten",
    "torch._C._cuda_getCurrentRawStream",
    f"{GUARDS}.assert_size_stride",
    f"{GUARDS}.assert_size_stride_grouped",
    f"{GUARDS}.assert_alignment",
    f"{GUARDS}.copy_if_misaligned",
    f"{GUARDS}._empty_strided_cpu",
    f"{GUARDS}._empty_strided_cuda",
    f"{GUARDS}._reinterpret_tensor",
)


def wrapper_values() -> dict[str, Any]:
    """The values of WRAPPER_NAMES in this torch, by name, but for those that need Inductor's import."""
    values = {name: _value_of(name) for name in WRAPPER_NAMES}
    values |= {"math.inf": math.inf, "math.nan": math.nan}
    values["torch._inductor.runtime.runtime_utils.assert_tensor_metadata"] = _assert_tensor_metadata
    return {name: value for name, value in values.items() if value is not None}


def is_plain_name(name: str) -> bool:
    """Whether a full name of torch is an op, or a constant that says how a tensor is."""
    constants = (torch.dtype, torch.layout, torch.memory_format)
    return name.startswith("torch.ops.") or isinstance(_value_of(name), constants)


def _value_of(name: str) -> Any:
    owner: Any = torch
    for part in name.split(".")[1:]:
        owner = getattr(owner, part, None)
    return owner


def _assert_tensor_metadata(
    tensor: Tensor | None, size: Any, stride: Any, dtype: torch.dtype, op: str | None = None
) -> None:
    """As torch 2.14 asserts it of what an op returned; its own lies in a module that imports Inductor."""
    if tensor is None:
        return
    if tensor.dtype != dtype:
        raise RuntimeError(f"{op or 'an op'} returned {tensor.dtype}; its fake promised {dtype}")
    guards: Any = torch._C._dynamo.guards
    guards.assert_size_stride(tensor, size, stride, op)
