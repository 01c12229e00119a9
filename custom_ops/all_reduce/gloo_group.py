"""A group whose ranks are processes that talk over gloo: of one machine, or of several."""

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...common.env import gloo_over_loopback
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
        self._call(dist.broadcast, size, src)
        if size.item() < 0:
            raise UnsupportedError(f"value of rank {src} is {shown(value)}; wanted what JSON can say")
        data = torch.frombuffer(bytearray(text or int(size)), dtype=torch.uint8)
        self._call(dist.broadcast, data, src)
        return json.loads(bytes(data.numpy()))

    def barrier(self) -> None:
        """See Group."""
        self._parts(torch.zeros(1))

    def close(self) -> None:
        """See Group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _parts(self, x: Tensor) -> list[Tensor]:
        """Every rank's x."""
        x = x.detach().contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        if x.numel():
            self._call(dist.all_gather, [_as_bytes(part) for part in parts], _as_bytes(x))
        return parts

    def _call(self, collective: Any, *args: Any) -> None:
        try:
            collective(*args)
        except (RuntimeError, ValueError) as error:
            raise GroupError(f"rank {self.rank} of {self.size} heard no more of another: {error}") from error


def _as_bytes(x: Tensor) -> Tensor:
    """The same memory, since gloo does not know every dtype."""
    return x.reshape(-1).view(torch.uint8)


def _as_json(value: Any) -> bytes | None:
    """The value, or None where JSON cannot say it."""
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError):
        return None
