"""The CUDA kernel of lamina::all_reduce_add_rms_norm, for ranks that read each other's memory."""

from functools import partial

import torch
from torch import Tensor

from ...common.errors import UnsupportedError
from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.layout import num_rows
from .._shared.registry import Call, Provider
from ..all_reduce.group import group_of
from ..all_reduce.peers import VECTOR, Peers, is_small
from ..all_reduce.peers import obstacle as obstacle_to_sum
from ._composed import all_reduce_add_rms_norm as composed

MAX_ROW_BYTES = 32768  # of a row that a block holds: 4 vectors of 16 bytes a thread, 512 threads


def load(*, composes: bool = True) -> Call:
    """Build or load the kernel; the op on it where that is worth it, else on the ops it stands for.

    Not composes: on the kernel alone. A call raises UnsupportedError where it cannot serve.
    """
    kernel = CudaKernel("all_reduce_add_rms_norm", "49qd2q")  # struct AllReduceAddNormArguments

    def all_reduce_add_rms_norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float, world_size: int, unrounded: bool = False
    ) -> tuple[Tensor, Tensor]:
        peers = group_of(world_size).peers
        x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
        why = obstacle(peers, x, residual, weight)
        if composes and (why is not None or peers is None or not is_small(peers, x)):
            return composed(x, residual, weight, eps, world_size, unrounded)
        if why is not None or peers is None:
            raise UnsupportedError(f"all_reduce_add_rms_norm by one_shot: {why}; use provider 'auto'")
        out, total = torch.empty_like(x), torch.empty_like(x)
        of_row = weight.data_ptr(), num_rows(x), x.shape[-1], eps, unrounded, DTYPES[x.dtype]
        peers.launch(kernel, (x, residual, out, total), *of_row)
        return out, total

    return all_reduce_add_rms_norm


def obstacle(peers: Peers | None, x: Tensor, residual: Tensor, weight: Tensor) -> str | None:
    """Why the kernel cannot serve these contiguous tensors, None where it can."""
    row_bytes = x.shape[-1] * x.element_size()
    if row_bytes % VECTOR or row_bytes > MAX_ROW_BYTES:
        return f"a row of x has {row_bytes} bytes; wanted a multiple of {VECTOR}, at most {MAX_ROW_BYTES}"
    if (residual.data_ptr() | weight.data_ptr()) % VECTOR:
        return f"residual or weight does not lie on {VECTOR} bytes"
    return obstacle_to_sum(peers, x)


DTYPES_TAKEN = frozenset(DTYPES)
PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=DTYPES_TAKEN)
ONE_SHOT = Provider(name="one_shot", load=partial(load, composes=False), devices=DEVICES, dtypes=DTYPES_TAKEN)
