"""Ranks whose kernels read each other's memory: what a launch is given, and which sums that is worth."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .._shared.cuda_kernel import DTYPES

Method = Literal["one_shot", "two_shot"]
MAX_RANKS, MAX_BLOCKS, HEADER_BYTES = 8, 128, 16384  # csrc/include/peers.cuh has the same numbers
NUM_BUFFERS = 3  # two for input, which take turns, and one for results
# Of a tensor, up to which every rank sends it to all others in packets that say themselves when they are
# there: one way over the link, where flags and reading take several. They are twice as many bytes: of eight
# ranks each sends 0.9 MB, 2 us at NVLink's 450 GB/s, which is about what the other ways would take.
PACKET_BYTES = 64 << 10
NUM_PACKET_BUFFERS = 2 * MAX_RANKS  # of each sender two that take turns, of two bytes for one of the tensor
VECTOR = 16  # bytes that a thread moves at once
MAX_BYTES = 4 << 20  # of a tensor, beyond which NCCL sums; a multiple of VECTOR
# By ranks, up to which every rank reads all of every other's tensor; beyond, each sums a share. Two ranks
# read as much either way, and one-shot waits once less.
ONE_SHOT_BYTES: Mapping[int, int] = {
    2: MAX_BYTES,
    3: 1 << 20,
    4: 1 << 20,
    5: 512 << 10,
    6: 512 << 10,
    7: 256 << 10,
    8: 256 << 10,
}
Kernel = Callable[..., None]  # of a device and the fields of its arguments


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Memory of every rank, as this one's device reaches it."""

    memory: tuple[int, ...]  # addresses by rank, of memory_bytes(max_bytes) each, zeroed when it was new
    rank: int
    max_bytes: int = MAX_BYTES  # of a tensor
    max_blocks: int  # of a launch, the same on every rank, all of which its device runs at once
    packet_bytes: int = PACKET_BYTES  # of a tensor sent in packets, the same on every rank; no more than that

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.memory)

    def launch(self, kernel: Kernel, tensors: Sequence[Tensor], *fields: float) -> None:
        """Run this rank's part of a kernel on its own tensors, contiguous and on 16 bytes; fields follow."""
        pointers = [[tensor.data_ptr()] for tensor in tensors]
        kernel(tensors[0].device, *self.fields(self.rank, pointers), *fields)

    def fields(self, first: int, pointers: Sequence[Sequence[int]]) -> list[int]:
        """What a launch is given for ranks from the first on; pointers: of each tensor, by those ranks."""
        local = len(pointers[0])
        fields = [*_padded(self.memory), self.size, first, local]
        fields += [self.max_bytes, self.max_blocks, self.packet_bytes]
        for of_tensor in pointers:
            fields += _padded(of_tensor)
        return fields


def memory_bytes(max_bytes: int) -> int:
    """How much memory of a rank the others reach, for tensors of so many bytes."""
    return HEADER_BYTES + NUM_BUFFERS * max_bytes + NUM_PACKET_BUFFERS * 2 * PACKET_BYTES


def _padded(pointers: Sequence[int]) -> list[int]:
    return [*pointers, *[0] * (MAX_RANKS - len(pointers))]


def obstacle(peers: Peers | None, x: Tensor) -> str | None:
    """Why kernels that read peers cannot sum such a tensor, None where they can."""
    if peers is None:
        return "its ranks do not read each other's memory"
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}; wanted {', '.join(map(str, DTYPES))}"
    num_bytes = x.numel() * x.element_size()
    if num_bytes > peers.max_bytes:
        return f"x has {num_bytes} bytes; wanted at most {peers.max_bytes}"
    if num_bytes % VECTOR or x.data_ptr() % VECTOR:
        return f"x has {num_bytes} bytes at address {x.data_ptr()}; wanted multiples of {VECTOR}"
    return None


def method_for(peers: Peers | None, x: Tensor) -> Method | None:
    """How kernels sum a contiguous tensor over ranks; None where the group has a better way, or no other."""
    if peers is None or obstacle(peers, x) is not None:
        return None
    return "one_shot" if is_small(peers, x) else "two_shot"


def is_small(peers: Peers, x: Tensor) -> bool:
    """Whether reading all of it from every rank costs less than waiting once more."""
    return x.numel() * x.element_size() <= ONE_SHOT_BYTES[peers.size]


def most_blocks(device: torch.device) -> int:
    """How many blocks of a launch a device runs at once, whatever a block takes."""
    processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return min(processors, MAX_BLOCKS)
