"""A group whose ranks are processes that talk over gloo: of one machine, or of several."""

import contextlib
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...common.env import gloo_over_loopback, nccl_without_multicast
from ...common.errors import GroupError, UnsupportedError, shown
from .group import sum_in_rank_order
from .peers import Peers


class GlooGroup:
    """A Group of processes on CPUs; a process is in one at a time.

    `meeting` is where its ranks find each other: "file:///path" of a file that does not exist yet, for ranks
    of one machine, or "tcp://host:port" of rank 0. A call that waits for another rank longer than
    `timeout` seconds is a GroupError, as is one after another rank's end.
    """

    peers: Peers | None = None

    def __init__(self, meeting: str, *, rank: int, size: int, timeout: float = 300.0) -> None:
        self.rank, self.size = rank, size
        self._first, self._process_group = 0, None  # of a part: the number of its first rank, and torch's
        if meeting.startswith("file:"):
            gloo_over_loopback()
        try:
            dist.init_process_group(
                "gloo",
                init_method=meeting,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout),
            )
        except (RuntimeError, ValueError) as error:
            raise GroupError(f"rank {rank} of {size} found no others at {meeting}: {error}") from error

    def part(self, size: int) -> "GlooGroup":
        """The group of so many ranks that this one is in: the first ones, those after them, and so on.

        Every rank asks for parts of the same size.
        """
        groups = _parts_of(self.size, size)
        part = object.__new__(GlooGroup)
        part.rank, part.size = self.rank % size, size
        part._first, part._process_group = self.rank - part.rank, groups[self.rank // size]
        return part

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Group."""
        return sum_in_rank_order(self._parts(x))

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """See Group."""
        return torch.cat(self._parts(x), dim=dim)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """See Group. UnsupportedError, on every rank, for what JSON cannot say."""
        text = _as_json(value) if self.rank == src else None
        size = torch.tensor([-1 if text is None else len(text)])
        self._call(dist.broadcast, size, self._first + src)
        if size.item() < 0:
            raise UnsupportedError(f"value of rank {src} is {shown(value)}; wanted what JSON can say")
        data = torch.frombuffer(bytearray(text or int(size)), dtype=torch.uint8)
        self._call(dist.broadcast, data, self._first + src)
        return json.loads(bytes(data.numpy()))

    def barrier(self) -> None:
        """See Group."""
        self._parts(torch.zeros(1))

    def mail(self, device: torch.device) -> "GlooMail":
        """See Group; on GPUs NCCL carries it."""
        assert self._process_group is None, "mail of a part"
        return GlooMail(self.over_nccl() if device.type == "cuda" else None, self.rank, self.size)

    def over_nccl(self, timeout: float = 300.0) -> Any:
        """torch's group of the same ranks for tensors on GPUs. All ranks, of all parts, ask at once."""
        nccl_without_multicast()
        options: dict[str, Any] = {"backend": "nccl", "timeout": timedelta(seconds=timeout)}
        if self._process_group is None:
            return dist.new_group(**options)
        return _parts_of(dist.get_world_size(), self.size, **options)[self._first // self.size]

    def close(self) -> None:
        """See Group. A part closes with the whole."""
        if self._process_group is None and dist.is_initialized():
            dist.destroy_process_group()

    def _parts(self, x: Tensor) -> list[Tensor]:
        """Every rank's x."""
        x = x.detach().contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        if x.numel():
            self._call(dist.all_gather, [_as_bytes(part) for part in parts], _as_bytes(x))
        return parts

    def _call(self, collective: Any, *args: Any) -> None:
        with _named_errors(self.rank, self.size):
            collective(*args, group=self._process_group)


class GlooMail:
    """A Mail between processes, over whatever torch's group carries."""

    def __init__(self, process_group: Any, rank: int, size: int) -> None:
        self._process_group, self._rank, self._size = process_group, rank, size

    def send(self, x: Tensor, to: int) -> Callable[[], None]:
        """See Mail."""
        with _named_errors(self._rank, self._size):
            sent: Any = dist.isend(x, to, group=self._process_group)

        def wait() -> None:
            with _named_errors(self._rank, self._size):
                sent.wait()

        return wait

    def receive(self, x: Tensor, source: int) -> None:
        """See Mail."""
        with _named_errors(self._rank, self._size):
            received: Any = dist.irecv(x, source, group=self._process_group)
            received.wait()


def _parts_of(num_ranks: int, size: int, **options: Any) -> list[Any]:
    """torch's groups of so many ranks that follow each other."""
    return [dist.new_group([*range(first, first + size)], **options) for first in range(0, num_ranks, size)]


@contextlib.contextmanager
def _named_errors(rank: int, size: int) -> Iterator[None]:
    """GroupError for those of torch."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise GroupError(f"rank {rank} of {size} heard no more of another: {error}") from error


def _as_bytes(x: Tensor) -> Tensor:
    """The same memory, since gloo does not know every dtype."""
    return x.reshape(-1).view(torch.uint8)


def _as_json(value: Any) -> bytes | None:
    """The value, or None where JSON cannot say it."""
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError):
        return None
