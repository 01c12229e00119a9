"""Weights sent by a trainer to runtimes in other processes: names and shapes first, then every tensor.

Every process joins a group of its own for one update, whatever else it uses torch.distributed for.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..common.errors import ConfigError, GroupError, LaminaError, RequestError, shown
from ..models.checkpoints.weight_update import Header, headers_of
from .validation import check_type, integer, number

SENDER = 0  # the rank that has the weights
Backend = Literal["gloo", "nccl"]
Check = Callable[[Mapping[str, Header]], object]
Apply = Callable[[Mapping[str, Tensor]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightGroup:
    """A group in which rank 0 sends weights to all others: a runtime has one of the other ranks.

    Raises ConfigError, naming the field, for a value that it cannot have.
    """

    host: str = "127.0.0.1"
    """Address of rank 0."""
    port: int
    """A free port of it."""
    rank: int
    """Of this process: 0 sends, others receive."""
    world_size: int
    """Processes in all."""
    backend: Backend = "gloo"
    """gloo, over the network from memory of the host, or nccl, between GPUs."""
    timeout: float = 600.0
    """Seconds to wait for the others."""

    def __post_init__(self) -> None:
        check_type("host", self.host, (str,), "a name or address")
        counts = {"port": (1, 65535), "world_size": (2, 2**16), "rank": (0, 2**16)}
        for name, (low, high) in counts.items():
            wanted = f"from {low} to {high}"
            given = getattr(self, name)
            integer(name, given, wanted, low=low, high=high, optional=False, error=ConfigError)
        number(
            "timeout", self.timeout, "above 0", zero=False, high=86400.0, optional=False, error=ConfigError
        )
        if self.rank >= self.world_size:
            raise ConfigError(f"rank is {self.rank}; wanted one below world_size, which is {self.world_size}")
        if self.backend not in ("gloo", "nccl"):
            raise ConfigError(f"backend is {shown(self.backend)}; wanted 'gloo' or 'nccl'")

    def receive(self, check: Check, apply: Apply) -> None:
        """Joins, and calls apply() with what rank 0 sends, in memory of the host, if check() lets it pass.

        check() gets names, shapes and dtypes before any tensor is sent, and raises for what it refuses: then
        nothing is sent, to nobody. Raises GroupError where the group breaks.
        """
        if self.rank == SENDER:
            raise RequestError("rank is 0, which sends; a runtime wants another")
        with self._joined() as line:
            headers = line.take_headers()
            line.agree(lambda: check(headers))
            received = {name: line.broadcast_to(header).cpu() for name, header in headers.items()}
            line.agree(lambda: apply(received))

    def send(self, weights: Mapping[str, Tensor]) -> None:
        """Joins as rank 0, sends weights by the names that checkpoints use, and waits until all use them.

        Raises RequestError where a receiver refuses them, which its own call says more of.
        """
        if self.rank != SENDER:
            raise RequestError(f"rank is {self.rank}, which receives; rank 0 sends")
        headers = headers_of(weights)
        with self._joined() as line:
            line.send_headers(headers)
            line.agree(_nothing)
            for tensor in weights.values():
                line.broadcast(tensor.detach().to(line.device).contiguous())
            line.agree(_nothing)

    @contextmanager
    def _joined(self) -> Iterator["_Line"]:
        timeout = timedelta(seconds=self.timeout)
        try:
            store: Any = dist.TCPStore(  # type: ignore[attr-defined]
                self.host, self.port, self.world_size, self.rank == SENDER, timeout
            )
            yield _Line(self._process_group(store, timeout), self.backend)
        except LaminaError:
            raise
        except RuntimeError as error:  # of torch, where a connection breaks or nobody comes
            raise GroupError(
                f"the group of {self.world_size} for weights broke: {shown(error, 300)}"
            ) from error

    def _process_group(self, store: Any, timeout: timedelta) -> Any:
        if self.backend == "gloo":
            return dist.ProcessGroupGloo(store, self.rank, self.world_size, timeout)
        if not dist.is_nccl_available():
            raise ConfigError("backend is 'nccl', which this torch does not have; wanted 'gloo'")
        nccl: Any = dist.ProcessGroupNCCL
        return nccl(store, self.rank, self.world_size)


class _Line:
    """A group that was joined: bytes from rank 0 to all, and what all agree on."""

    def __init__(self, group: Any, backend: str) -> None:
        self._group = group
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        )

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The tensor of rank 0, whose bytes fill those of others."""
        if tensor.nbytes:
            options = dist.BroadcastOptions()
            options.rootRank = SENDER
            self._group.broadcast([tensor.reshape(-1).view(torch.uint8)], options).wait()
        return tensor

    def broadcast_to(self, header: Header) -> Tensor:
        """A tensor that rank 0 sends."""
        return self.broadcast(torch.empty(header.shape, dtype=header.dtype, device=self.device))

    def send_headers(self, headers: Mapping[str, Header]) -> None:
        plain = [[name, list(one.shape), str(one.dtype)] for name, one in headers.items()]
        text = torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)
        self.broadcast(torch.tensor([len(text)], device=self.device))
        self.broadcast(text.to(self.device))

    def take_headers(self) -> dict[str, Header]:
        length = self.broadcast_to(Header((1,), torch.int64))
        text = bytes(self.broadcast_to(Header((int(length),), torch.uint8)).tolist())
        return {
            name: Header(tuple(shape), getattr(torch, dtype.removeprefix("torch.")))
            for name, shape, dtype in json.loads(text)
        }

    def agree(self, action: Callable[[], object]) -> None:
        """Do something that may raise; where it has at anybody else, raise RequestError."""
        failure: Exception | None = None
        try:
            action()
        except Exception as error:
            failure = error
        is_right = torch.tensor([int(failure is None)], device=self.device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._group.allreduce([is_right], options).wait()
        if failure is not None:
            raise failure
        if not int(is_right):
            raise RequestError("another process of the group refused these weights; its own error says why")


def _nothing() -> None:
    """The sender has nothing to refuse."""
