"""The formula of lamina::act_and_mul_fp8."""

from torch import Tensor

from ..gelu_and_mul.reference import gelu_and_mul
from ..quantize_fp8.reference import quantize_fp8
from ..silu_and_mul.reference import silu_and_mul


def act_and_mul_fp8(gate_up: Tensor, gelu: bool, group: int) -> tuple[Tensor, Tensor]:
    """quantize_fp8 of silu_and_mul, or of gelu_and_mul."""
    return quantize_fp8(gelu_and_mul(gate_up) if gelu else silu_and_mul(gate_up), group)
