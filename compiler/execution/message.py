"""Values of a plan that one stage of it computes and another reads, as one message of bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

HEADER = 64  # bytes before the values; the first four are an int32 that is not 0 where the step failed
ALIGNMENT = 64  # bytes, of every value: generated kernels load vectors


class TokenValue(NamedTuple):
    """A contiguous tensor with a row for each token."""

    shape: tuple[int, ...]  # of a row
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of a row."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """Which values a message has, in order; where they lie in it follows from the number of tokens."""

    values: tuple[TokenValue, ...]

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of a message for so many tokens."""
        return HEADER + sum(_aligned(num_tokens * value.num_bytes) for value in self.values)

    def views(self, message: Tensor, num_tokens: int) -> list[Tensor]:
        """The values [num_tokens, ...] where they lie in a message, uint8, of at least so many bytes."""
        start, found = HEADER, []
        for value in self.values:
            size = num_tokens * value.num_bytes
            found.append(message[start : start + size].view(value.dtype).view(num_tokens, *value.shape))
            start += _aligned(size)
        return found

    def packed(self, values: Sequence[Tensor], received: Tensor | None) -> Tensor:
        """A new message of these values; the step has failed if it had in the message received, if any."""
        num_tokens = values[0].shape[0]
        message = torch.empty(self.num_bytes(num_tokens), dtype=torch.uint8, device=values[0].device)
        message.zero_()  # gaps too: who makes a step again compares all bits
        if received is not None:
            message[:HEADER].copy_(received[:HEADER])
        for place, value in zip(self.views(message, num_tokens), values, strict=True):
            place.copy_(value)
        return message


def failure_of(message: Tensor) -> Tensor:
    """Whether a stage before has failed at the step, int32 [1], where it lies in its message."""
    return message[:4].view(torch.int32)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
