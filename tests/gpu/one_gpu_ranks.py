"""Ranks that share one GPU: each has memory of its own, and one launch runs all of them side by side."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lamina.custom_ops.all_reduce.group import Group
from lamina.custom_ops.all_reduce.peers import MAX_BYTES, Kernel, Peers, memory_bytes, most_blocks
from lamina.custom_ops.all_reduce.thread_group import ThreadGroup

from ..ranks import as_threads

DEVICE = torch.device("cuda", 0)


class OneGpuRanks:
    """Memory of `size` ranks. A launch is of all at once, since blocks that wait for each other must run."""

    def __init__(self, size: int) -> None:
        num_bytes = memory_bytes(MAX_BYTES)
        self._memory = [torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(size)]
        memory = tuple(one.data_ptr() for one in self._memory)
        self.peers = Peers(memory=memory, rank=0, max_blocks=most_blocks(DEVICE) // size)

    def launch(self, kernel: Kernel, tensors: Sequence[Sequence[Tensor]], *fields: float) -> None:
        """Run a kernel; tensors: each of its arguments, by rank."""
        pointers = [[tensor.data_ptr() for tensor in ranks] for ranks in tensors]
        kernel(DEVICE, *self.peers.fields(0, pointers), *fields)


@dataclass(frozen=True, kw_only=True)
class ThreadPeers(Peers):
    """The peers of a rank that is a thread: rank 0 launches for all, on the one stream that they have."""

    group: ThreadGroup
    ranks: OneGpuRanks

    def launch(self, kernel: Kernel, tensors: Sequence[Tensor], *fields: float) -> None:
        """See Peers."""
        by_rank = self.group.exchange(self.rank, tensors)
        if self.rank == 0:
            self.ranks.launch(kernel, list(zip(*by_rank, strict=True)), *fields)
        self.group.wait()


def as_threads_of_one_gpu(size: int, work: Callable[[Group], Any]) -> list[Any]:
    """What each rank's work returns, in order; ranks are threads whose kernels read each other's memory."""
    ranks = OneGpuRanks(size)

    def with_peers(group: Any) -> Any:
        own: dict[str, Any] = {"memory": ranks.peers.memory, "max_blocks": ranks.peers.max_blocks}
        group.peers = ThreadPeers(rank=group.rank, group=group._group, ranks=ranks, **own)
        return work(group)

    return as_threads(size, with_peers)
