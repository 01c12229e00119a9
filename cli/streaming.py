"""An answer printed as it is written."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from .interrupt import StopOnInterrupt

if TYPE_CHECKING:
    from ..runtime.engine.outputs import StreamDelta


class Streamed(NamedTuple):
    """What was printed, in what time, and whether Ctrl-C cut it short."""

    text: str
    num_tokens: int
    num_first: int  # tokens of the first piece
    interrupted: bool
    seconds_to_first: float
    seconds_after: float

    def figures(self) -> str:
        """The time that the prompt took, and apart from it the rate of the answer."""
        first = f"first token after {self.seconds_to_first:.2f} s"
        further = self.num_tokens - self.num_first
        if further < 1 or self.seconds_after <= 0:
            return f"{self.num_tokens} tokens, {first}"
        each, rate = self.seconds_after / further * 1000, further / self.seconds_after
        return f"{self.num_tokens} tokens, {first}, then {each:.1f} ms a token ({rate:.1f} tokens/s)"


def print_stream(deltas: Iterator["StreamDelta"]) -> Streamed:
    """Each piece of text as soon as it is known; Ctrl-C stops between two pieces, and at once before any."""
    pieces, num_tokens, num_first = [], 0, 0
    started = first = time.perf_counter()
    with StopOnInterrupt() as interrupt, contextlib.suppress(KeyboardInterrupt):
        interrupt.is_waiting = True
        for delta in deltas:
            interrupt.is_waiting = False
            pieces.append(delta.text)
            num_tokens += len(delta.token_ids)
            if not num_first:
                num_first, first = num_tokens, time.perf_counter()
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            if interrupt.requested:
                break
    sys.stdout.write("\n")
    return Streamed(
        text="".join(pieces),
        num_tokens=num_tokens,
        num_first=num_first,
        interrupted=interrupt.requested,
        seconds_to_first=first - started,
        seconds_after=time.perf_counter() - first,
    )
