"""A group whose ranks are processes with a GPU each: tensors go by NCCL or kernels, all else by the host."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...common.errors import GroupError, UnsupportedError
from ...common.logging import get_logger, log_once
from .gloo_group import GlooGroup
from .group import Mail, sum_in_rank_order
from .peer_memory import PeerMemory
from .peers import Peers

logger = get_logger("custom_ops")
# By its new name where torch has that, as the old one warns there.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CudaGroup:
    """A Group that takes the place of one of torch.distributed's processes, which it goes on to ask.

    Its ranks make it at once, each with the GPU that it has. `peers` is there if all of them read each
    other's memory; why not is logged otherwise. GroupError where NCCL cannot join the ranks. What it does on
    a GPU can be captured in a CUDA graph, once it has been done for the same size.
    """

    def __init__(self, host: GlooGroup, device: torch.device, *, timeout: float = 1800.0) -> None:
        self.rank, self.size, self._host = host.rank, host.size, host
        try:
            self._nccl: Any = host.over_nccl(timeout)
            self.barrier()
            self._try_nccl(device)
        except (RuntimeError, ValueError) as error:
            got = f"rank {self.rank} of {self.size} reached no others through NCCL: {error}"
            raise GroupError(f"{got}; wanted a GPU for every rank") from error
        self._memory, self.peers = self._open_peers(device)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Group."""
        if x.device.type == "cpu":
            return self._host.all_reduce(x)
        total = sum_of_two if self.size == 2 else sum_by_shares
        return total(x, self.size, self._nccl)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """See Group."""
        if x.device.type == "cpu":
            return self._host.all_gather(x, dim)
        return gather(x, dim, self.size, self._nccl)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """See Group."""
        return self._host.broadcast_object(value, src)

    def barrier(self) -> None:
        """See Group."""
        self._host.barrier()

    def mail(self, device: torch.device) -> Mail:
        """See Group."""
        return self._host.mail(device)

    def close(self) -> None:
        """See Group."""
        self.peers = None
        if self._memory is not None:
            self._memory.close()
        self._host.close()  # NCCL's part with it

    def _try_nccl(self, device: torch.device) -> None:
        """Sum once, by both ways, so that what NCCL keeps on the GPU is there before memory is shared out."""
        ones = torch.ones(self.size, device=device)
        for total in (way(ones, self.size, self._nccl) for way in (sum_of_two, sum_by_shares)):
            if total.tolist() != [self.size] * self.size:
                raise GroupError(f"NCCL's sum of {self.size} ones is {total.tolist()}")

    def _open_peers(self, device: torch.device) -> tuple[PeerMemory | None, Peers | None]:
        try:
            memory = PeerMemory(self, device)
        except UnsupportedError as error:
            if self.rank == 0:
                log_once(logger, logging.WARNING, f"all_reduce on {self.size} GPUs: NCCL alone ({error})")
            return None, None
        if self.rank == 0:
            log_once(logger, logging.INFO, f"all_reduce on {self.size} GPUs: kernels, and NCCL beyond")
        return memory, memory.peers


def sum_of_two(x: Tensor, size: int, process_group: Any) -> Tensor:
    """x of both ranks of a process group, summed by it: rounded once, and in whatever order, so all alike."""
    total = x.detach().clone()
    if total.numel():
        dist.all_reduce(total, group=process_group)
    return total


def sum_by_shares(x: Tensor, size: int, process_group: Any) -> Tensor:
    """x of all ranks of a process group, summed in their order in float32 or wider and rounded once.

    NCCL itself rounds after each rank, in an order of its own; so it moves shares, and each rank sums one.
    """
    share = -(-x.numel() // size)
    given = x.new_zeros(size * share)
    given[: x.numel()] = x.detach().reshape(-1)
    if share:
        parts = torch.empty_like(given)
        dist.all_to_all_single(parts, given, group=process_group)
        own = sum_in_rank_order(parts.view(size, share).unbind())
        _gather(given, own, group=process_group)
    return given[: x.numel()].view(x.shape)


def gather(x: Tensor, dim: int, size: int, process_group: Any) -> Tensor:
    """x of all ranks of a process group, one beside the other along a dimension."""
    parts = x.new_empty(size * x.numel())
    if x.numel():
        _gather(parts, x.detach().reshape(-1), group=process_group)
    return torch.cat(parts.view(size, *x.shape).unbind(), dim=dim)
