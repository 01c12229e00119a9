"""The CUDA kernel of lamina::silu_and_mul."""

from collections.abc import Callable

from torch import Tensor

from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.layout import as_rows, num_rows
from .._shared.registry import Provider


def load(op: str = "silu_and_mul") -> Callable[..., Tensor]:
    """Build or load the kernel of a gate's op; the op's function on it."""
    kernel = CudaKernel(op, "6q")  # struct GateArguments

    def act_and_mul(gate_up: Tensor) -> Tensor:
        intermediate = gate_up.shape[-1] // 2
        out = gate_up.new_empty((*gate_up.shape[:-1], intermediate))
        gate_up, stride = as_rows(gate_up)
        kernel(
            gate_up.device,
            *(gate_up.data_ptr(), out.data_ptr()),
            *(num_rows(gate_up), intermediate, stride, DTYPES[gate_up.dtype]),
        )
        return out

    return act_and_mul


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
