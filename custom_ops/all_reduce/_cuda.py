"""The CUDA kernels of lamina::all_reduce, for ranks that read each other's memory."""

from functools import partial

import torch
from torch import Tensor

from ...common.errors import UnsupportedError
from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.registry import Call, Provider
from .group import group_of
from .peers import Method, Peers, method_for, obstacle


def load() -> Call:
    """Build or load the kernels; the op on that which the size is worth, or on what else the group has."""
    kernel = _kernel()

    def by_size(x: Tensor, world_size: int) -> Tensor:
        group, x = group_of(world_size), x.contiguous()
        method = method_for(group.peers, x)
        if method is None or group.peers is None:
            return group.all_reduce(x)
        return _sum(kernel, group.peers, x, method)

    return by_size


def _load_one(method: Method) -> Call:
    """The op by one kernel alone. A call raises UnsupportedError where it cannot serve."""
    kernel = _kernel()

    def by_method(x: Tensor, world_size: int) -> Tensor:
        peers, x = group_of(world_size).peers, x.contiguous()
        why = obstacle(peers, x)
        if why is not None or peers is None:
            raise UnsupportedError(f"all_reduce by {method}: {why}; use provider 'auto'")
        return _sum(kernel, peers, x, method)

    return by_method


def _kernel() -> CudaKernel:
    return CudaKernel("all_reduce", "32q")  # struct AllReduceArguments


def _sum(kernel: CudaKernel, peers: Peers, x: Tensor, method: Method) -> Tensor:
    out = torch.empty_like(x)
    peers.launch(kernel, (x, out), x.numel(), method == "two_shot", DTYPES[x.dtype])
    return out


def _explicit(method: Method) -> Provider:
    dtypes = frozenset(DTYPES)
    return Provider(name=method, load=partial(_load_one, method), devices=DEVICES, dtypes=dtypes)


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES)
ONE_SHOT, TWO_SHOT = _explicit("one_shot"), _explicit("two_shot")
