"""Who serves a site: code that Inductor generates, or an op with kernels of its own."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

NARROW = (torch.bfloat16, torch.float16)
TAKEN = {
    "linear": NARROW,  # wider products stay torch's, whose sums tests compare with
    "add_rms_norm_linear": NARROW,
    "qk_norm": NARROW,
    "rotary_and_write_kv_cache": (*NARROW, torch.float32),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Whether a site becomes a call of the op, and why."""

    is_op: bool
    reason: str


Choose = Callable[[str, torch.device, torch.dtype], Choice]


def choose(op: str, device: torch.device, dtype: torch.dtype) -> Choice:
    """The op on a card and for dtypes that its kernels are meant for, else what Inductor generates."""
    if device.type != "cuda":
        return Choice(is_op=False, reason=f"on {device.type} the code that Inductor generates serves")
    if dtype not in TAKEN[op]:
        return Choice(is_op=False, reason=f"{dtype} is left to the code that Inductor generates")
    return Choice(is_op=True, reason=f"lamina::{op} has kernels of its own for {dtype} on {device.type}")
