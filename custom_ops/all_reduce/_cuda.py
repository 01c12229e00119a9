"""The CUDA kernels of lamina::all_reduce, for ranks that read each other's memory."""

from functools import partial

import torch
from torch import Tensor

from ...common.errors import UnsupportedError
from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.registry import Call, Provider
from .group import group_of
from .peers import Method, method_for, obstacle


def load(only: Method | None = None) -> Call:
    """Build or load the kernels; the op on that which the size is worth, or on what else the group has.

    only: on one of them. A call raises UnsupportedError where it cannot serve.
    """
    kernel = CudaKernel("all_reduce", "33q")  # struct AllReduceArguments

    def all_reduce(x: Tensor, world_size: int) -> Tensor:
        group, x = group_of(world_size), x.contiguous()
        peers, method = group.peers, only or method_for(group.peers, x)
        if method is None:
            return group.all_reduce(x)
        why = obstacle(peers, x)
        if why is not None or peers is None:
            raise UnsupportedError(f"all_reduce by {method}: {why}; use provider 'auto'")
        out = torch.empty_like(x)
        peers.launch(kernel, (x, out), x.numel(), method == "two_shot", DTYPES[x.dtype])
        return out

    return all_reduce


def _explicit(method: Method) -> Provider:
    dtypes = frozenset(DTYPES)
    return Provider(name=method, load=partial(load, method), devices=DEVICES, dtypes=dtypes)


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES)
ONE_SHOT, TWO_SHOT = _explicit("one_shot"), _explicit("two_shot")
