"""What the ranks of a model say to each other: sums, parts, small objects; and which group a rank is of."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...common.errors import GroupError
from .peers import Peers


class Group(Protocol):
    """`size` ranks, numbered from 0, that call the same methods in the same order.

    Whatever a method returns has the same bits on every rank. GroupError where another rank is lost, late or
    calls something else.
    """

    size: int
    rank: int
    peers: Peers | None  # whose memory kernels of this rank read, where they can

    def all_reduce(self, x: Tensor) -> Tensor:
        """A new tensor like x: the sum over ranks in their order, in float32 or wider, rounded once."""

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """A new tensor: every rank's x in the order of ranks, one beside the other along a dimension."""

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Rank src's value, whatever others bring: what JSON can say, with lists for tuples."""

    def barrier(self) -> None:
        """Return once every rank is here."""

    def mail(self, device: torch.device) -> "Mail":
        """What brings tensors on a device to other ranks. Every rank asks for the same devices, in order."""

    def close(self) -> None:
        """Leave the group; twice is once."""


class Mail(Protocol):
    """Tensors from rank to rank, uint8 [bytes]: what one sends another receives, in order.

    On a GPU nothing here waits on the host: the current stream does. GroupError as of a Group.
    """

    def send(self, x: Tensor, to: int) -> Callable[[], None]:
        """Begin to send a tensor. What is returned waits until it may be written again."""

    def receive(self, x: Tensor, source: int) -> None:
        """Fill a tensor with the next one that a rank has sent, which is as large."""


class MirrorGroup:
    """Rank 0 of a group whose other ranks, if any, say what it says: to be alone, or try a program alone."""

    rank = 0
    peers: Peers | None = None

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Group."""
        return sum_in_rank_order([x] * self.size)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """See Group."""
        return torch.cat([x] * self.size, dim=dim)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """See Group."""
        return value

    def barrier(self) -> None:
        """See Group."""

    def mail(self, device: torch.device) -> Mail:
        """See Group: there is nobody to write to."""
        raise GroupError("mail: a process that mirrors itself has no other to send to")

    def close(self) -> None:
        """See Group."""


_of_thread = threading.local()
_of_process: tuple[Group, Group] = MirrorGroup(1), MirrorGroup(1)


def set_group(group: Group | None, world: Group | None = None) -> None:
    """Make this process a rank of the group; None: it is alone again.

    world: of all ranks of a model whose layers are shared out among several groups; None: there is one.
    """
    global _of_process
    own = MirrorGroup(1) if group is None else group
    _of_process = own, own if world is None else world


@contextlib.contextmanager
def group_of_thread(group: Group, world: Group | None = None) -> Iterator[None]:
    """While it lasts, this thread is a rank of the group, whatever its process is; world as of set_group."""
    before = getattr(_of_thread, "groups", None)
    _of_thread.groups = group, group if world is None else world
    try:
        yield
    finally:
        _of_thread.groups = before


def current_group() -> Group:
    """The group that this thread is a rank of, or else this process; one of its own if neither is."""
    return _groups()[0]


def current_world() -> Group:
    """The group of all ranks of the model: the current group, or that and those of the other stages."""
    return _groups()[1]


def _groups() -> tuple[Group, Group]:
    return getattr(_of_thread, "groups", None) or _of_process


def group_of(world_size: int) -> Group:
    """The current group. GroupError where it has another number of ranks."""
    group = current_group()
    if group.size != world_size:
        got = f"all_reduce: world_size is {world_size}"
        raise GroupError(f"{got}; wanted {group.size}, as this process is rank {group.rank} of so many")
    return group


def said_by_all(group: Group, value: Any) -> list[Any]:
    """Every rank's value, in the order of ranks; see Group.broadcast_object."""
    return [group.broadcast_object(value, src=rank) for rank in range(group.size)]


@contextlib.contextmanager
def rank_0_first() -> Iterator[bool]:
    """The block runs on rank 0 before it does on others, so that they find what it made; whether it is 0."""
    group = current_world()
    if group.rank:
        group.barrier()
    yield not group.rank
    if not group.rank:
        group.barrier()


def sum_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of the tensors from the first on, in float32 or wider, rounded once to their dtype."""
    dtype = parts[0].dtype
    total = parts[0].to(torch.promote_types(dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)
