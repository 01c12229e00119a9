"""A group whose ranks are threads of one process."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...common.errors import GroupError
from .group import sum_in_rank_order
from .peers import Peers


class ThreadGroup:
    """A group of `size` ranks; one that fails lets none of the others wait."""

    def __init__(self, size: int, *, timeout: float = 300.0) -> None:
        self._timeout = timeout
        self._barrier = threading.Barrier(size)
        self._said: list[Any] = [None] * size
        self._sent: dict[tuple[int, int], queue.Queue[Tensor]] = {
            (source, to): queue.Queue() for source in range(size) for to in range(size)
        }
        self.ranks = tuple(_Rank(self, rank, size) for rank in range(size))

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks. GroupError where one is lost or late."""
        self._said[rank] = value
        self.wait()
        said = list(self._said)
        self.wait()  # nobody says more before all have heard
        return said

    def wait(self) -> None:
        """Return once every rank is here."""
        try:
            self._barrier.wait(self._timeout)
        except threading.BrokenBarrierError as error:
            raise GroupError("a rank of this process's group of threads failed, or is late") from error

    def send(self, x: Tensor, source: int, to: int) -> None:
        """Put a copy of a tensor where a rank takes it, whenever it does."""
        self._sent[source, to].put(x.clone())

    def receive(self, source: int, to: int) -> Tensor:
        """The next tensor that a rank has sent. GroupError where none comes."""
        try:
            return self._sent[source, to].get(timeout=self._timeout)
        except queue.Empty as error:
            raise GroupError(f"rank {source} has sent nothing for {self._timeout:g} s") from error

    def abort(self) -> None:
        """Have every rank that waits, and every one that comes, raise GroupError."""
        self._barrier.abort()


class _Rank:
    """A Group: one of a ThreadGroup's."""

    peers: Peers | None = None

    def __init__(self, group: ThreadGroup, rank: int, size: int) -> None:
        self._group, self.rank, self.size = group, rank, size

    def all_reduce(self, x: Tensor) -> Tensor:
        return sum_in_rank_order(self._parts(x))

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._parts(x), dim=dim)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        return self._group.exchange(self.rank, value)[src]

    def barrier(self) -> None:
        self._group.wait()

    def mail(self, device: torch.device) -> "_Rank":
        return self

    def send(self, x: Tensor, to: int) -> Callable[[], None]:
        self._group.send(x, self.rank, to)
        return lambda: None

    def receive(self, x: Tensor, source: int) -> None:
        x.copy_(self._group.receive(source, self.rank))

    def close(self) -> None:
        self._group.abort()

    def _parts(self, x: Tensor) -> list[Tensor]:
        return self._group.exchange(self.rank, x.detach().clone())  # its owner may write into it at once
