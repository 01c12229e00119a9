"""An answer printed as it is written."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from .interrupt import StopOnInterrupt

if TYPE_CHECKING:
    from ..runtime.outputs import StreamDelta


class Streamed(NamedTuple):
    """What was printed, and whether Ctrl-C cut it short."""

    text: str
    num_tokens: int
    interrupted: bool


def print_stream(deltas: Iterator["StreamDelta"]) -> Streamed:
    """Each piece of text as soon as it is known; Ctrl-C stops between two pieces."""
    pieces, num_tokens = [], 0
    with StopOnInterrupt() as interrupt:
        for delta in deltas:
            pieces.append(delta.text)
            num_tokens += len(delta.token_ids)
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            if interrupt.requested:
                break
    sys.stdout.write("\n")
    return Streamed("".join(pieces), num_tokens, interrupt.requested)
