"""FP8 (e4m3): its largest number, and what tensors of it cannot do by themselves."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of the type's finite values


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor as what copies it takes it: of FP8, in which torch and GPUs copy little, its bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def divided(x: Tensor, divisor: float) -> Tensor:
    """x / divisor rounded once on every device; of a plain number a GPU's torch multiplies by the inverse."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)
