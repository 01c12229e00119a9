"""What a rank has from the stage before, and what it sends to the one behind: one message each in a step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle

import torch
from torch import Tensor

from ...common.errors import EngineError
from ...compiler.execution.message import MessageLayout, failure_of
from ...custom_ops.all_reduce.group import Mail

NUM_BUFFERS = 2  # messages: one is in flight while the next is made


class EarlierStageFailedError(EngineError):
    """A step failed in a stage before, which says why."""


class StageLink:
    """Exactly one message comes in a step and one goes, whatever fails in it: so stages stay in step.

    A message of a step that failed says so, and all stages behind hand that on.
    """

    def __init__(
        self,
        mail: Mail,
        *,
        takes: MessageLayout | None,
        gives: MessageLayout | None,
        received: Tensor | None,
        source: int,
        target: int,
        max_num_tokens: int,
        device: torch.device,
    ) -> None:
        """takes: from rank `source`, None for the first stage; gives: to rank `target`, None for the last.

        received: where messages are taken to, uint8 of as many bytes as the largest.
        """
        self._mail, self._takes, self._gives = mail, takes, gives
        self._received, self._source, self._target = received, source, target
        size = 0 if gives is None else gives.num_bytes(max_num_tokens)
        empty = torch.empty(NUM_BUFFERS, size, dtype=torch.uint8, device=device)
        self._buffers = cycle([_Outgoing(buffer) for buffer in empty])
        self._is_sent = True

    @property
    def is_last(self) -> bool:
        """Whether no stage is behind, so that this one samples."""
        return self._gives is None

    @contextmanager
    def step(self, num_tokens: int) -> Iterator[None]:
        """Receive what a step of so many tokens, padding included, goes on from; send() belongs in it.

        Where it ends without, the stages behind hear that it failed. On a CPU EarlierStageFailedError where
        one did before; on a GPU `failure` says so later, to who reads it.
        """
        self._is_sent = False
        try:
            if self._takes is not None and self._received is not None:
                message = self._received[: self._takes.num_bytes(num_tokens)]
                self._mail.receive(message, self._source)
                if message.device.type == "cpu" and failure_of(message).item():
                    raise EarlierStageFailedError("a stage before failed at this step")
            yield
        finally:
            if not self._is_sent and self._gives is not None:
                self._send(None, self._gives.num_bytes(num_tokens))

    def send(self, message: Tensor) -> None:
        """Send what a step has computed, uint8, which may be written again at once; nothing from the last."""
        if self._gives is not None:
            self._send(message, len(message))

    def failure(self) -> Tensor | None:
        """What says whether a stage before has failed at the step, int32 [1], once it is over."""
        return None if self._received is None else failure_of(self._received)

    def _send(self, message: Tensor | None, size: int) -> None:
        outgoing = next(self._buffers)
        outgoing.wait()
        buffer = outgoing.buffer[:size]
        if message is None:
            buffer.zero_()
            failure_of(buffer).fill_(1)
        else:
            buffer.copy_(message)
        self._is_sent = True  # whatever comes of it
        outgoing.wait = self._mail.send(buffer, self._target)


class _Outgoing:
    """Memory of a message, and what waits until it may be written again."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.wait: Callable[[], None] = lambda: None
