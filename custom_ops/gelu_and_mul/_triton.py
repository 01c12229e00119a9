"""lamina::gelu_and_mul by the Triton kernel of silu_and_mul."""

from torch import Tensor

from ..silu_and_mul._triton import act_and_mul


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """The op, as op.py states it."""
    return act_and_mul(gate_up, is_gelu=True)
