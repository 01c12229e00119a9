"""The CUDA kernel of lamina::all_reduce_add_rms_norm, for ranks that read each other's memory."""

import torch
from torch import Tensor

from ...common.errors import UnsupportedError
from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.layout import num_rows
from .._shared.registry import Call, Provider
from ..all_reduce import peers as of_ranks
from ..all_reduce.group import group_of
from ..all_reduce.peers import VECTOR, Peers
from ._composed import all_reduce_add_rms_norm as composed

MAX_ROW_BYTES = 32768  # of a row that a block holds: 4 vectors of 16 bytes a thread, 512 threads


def load() -> Call:
    """Build or load the kernel; the op on it where the size is worth one, else on the ops it stands for."""
    kernel = _kernel()

    def by_size(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float, world_size: int, unrounded: bool = False
    ) -> tuple[Tensor, Tensor]:
        peers = group_of(world_size).peers
        x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
        if peers is None or obstacle(peers, x, residual, weight) or not of_ranks.is_small(peers, x):
            return composed(x, residual, weight, eps, world_size, unrounded)
        return _sum_and_norm(kernel, peers, x, residual, weight, eps, unrounded)

    return by_size


def _load_one_shot() -> Call:
    """The op by the kernel alone. A call raises UnsupportedError where it cannot serve."""
    kernel = _kernel()

    def one_shot(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float, world_size: int, unrounded: bool = False
    ) -> tuple[Tensor, Tensor]:
        peers = group_of(world_size).peers
        x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
        why = obstacle(peers, x, residual, weight)
        if why is not None or peers is None:
            raise UnsupportedError(f"all_reduce_add_rms_norm by one_shot: {why}; use provider 'auto'")
        return _sum_and_norm(kernel, peers, x, residual, weight, eps, unrounded)

    return one_shot


def obstacle(peers: Peers | None, x: Tensor, residual: Tensor, weight: Tensor) -> str | None:
    """Why the kernel cannot serve these contiguous tensors, None where it can."""
    row_bytes = x.shape[-1] * x.element_size()
    if row_bytes % VECTOR or row_bytes > MAX_ROW_BYTES:
        return f"a row of x has {row_bytes} bytes; wanted a multiple of {VECTOR}, at most {MAX_ROW_BYTES}"
    if (residual.data_ptr() | weight.data_ptr()) % VECTOR:
        return f"residual or weight does not lie on {VECTOR} bytes"
    return of_ranks.obstacle(peers, x)


def _kernel() -> CudaKernel:
    return CudaKernel("all_reduce_add_rms_norm", "48qd2q")  # struct AllReduceAddNormArguments


def _sum_and_norm(
    kernel: CudaKernel, peers: Peers, x: Tensor, residual: Tensor, weight: Tensor, eps: float, unrounded: bool
) -> tuple[Tensor, Tensor]:
    out, total = torch.empty_like(x), torch.empty_like(x)
    of_row = weight.data_ptr(), num_rows(x), x.shape[-1], eps, unrounded, DTYPES[x.dtype]
    peers.launch(kernel, (x, residual, out, total), *of_row)
    return out, total


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
ONE_SHOT = Provider(name="one_shot", load=_load_one_shot, devices=DEVICES, dtypes=frozenset(DTYPES))
