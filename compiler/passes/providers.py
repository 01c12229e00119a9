"""Who serves a site: code that Inductor generates, or an op with kernels of its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

NARROW = (torch.bfloat16, torch.float16)
FLOATS = (*NARROW, torch.float32)
TAKEN: Mapping[str, Mapping[str, tuple[torch.dtype, ...]]] = {
    "cuda": {
        "linear": NARROW,  # wider GEMMs stay torch's, whose sums tests compare with
        "all_reduce_add_rms_norm": FLOATS,
        "add_rms_norm_linear": NARROW,
        "linear_lora": NARROW,
        "linear_silu_and_mul": NARROW,
        "linear_w4a16": NARROW,
        "lora": NARROW,
        "qk_norm": NARROW,
        "rms_norm_quantized": NARROW,
        "act_and_mul_quantized": NARROW,
        "mlp_w8a8": NARROW,
        "rotary_and_write_kv_cache": FLOATS,
    },
    "cpu": {"linear": NARROW, "add_rms_norm_linear": NARROW, "rotary_and_write_kv_cache": NARROW},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Whether a site becomes a call of the op, and why."""

    is_op: bool
    reason: str


Choose = Callable[[str, torch.device, torch.dtype], Choice]


def choose(op: str, device: torch.device, dtype: torch.dtype) -> Choice:
    """The op where it has a kernel for this device and dtype, else Inductor's generated code."""
    taken = TAKEN[device.type]
    if op not in taken:
        return Choice(is_op=False, reason=f"on {device.type} the code that Inductor generates serves")
    if dtype not in taken[op]:
        return Choice(is_op=False, reason=f"{dtype} is left to the code that Inductor generates")
    return Choice(is_op=True, reason=f"lamina::{op} has kernels of its own for {dtype} on {device.type}")
