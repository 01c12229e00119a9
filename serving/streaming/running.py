"""Generations that answer one HTTP request: read as one, ended together."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...runtime.engine.outputs import CompletionOutput, RequestOutput, StreamDelta
from ..protocol.usage import Usage, usage

if TYPE_CHECKING:
    from ...runtime.engine.generation import Generation
    from ..admission.lease import Lease

Read = Callable[[], Awaitable[list[StreamDelta]]]


class Running:
    """One generation a prompt; answer a of prompt p, of n answers each, has the index p * n + a."""

    def __init__(self, generations: Sequence["Generation"], lease: "Lease") -> None:
        """lease: what admission gave for them, which ends them and is released with them."""
        self.generations = tuple(generations)
        self._lease = lease
        self._reads: dict[asyncio.Future[list[StreamDelta]], int] = {}  # by the generation that is being read
        self._unread = set(range(len(self.generations)))
        self._is_late = False

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all answers that may be read by now."""
        return sum(generation.num_output_tokens for generation in self.generations)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(generation.prompt_token_ids) for generation in self.generations)

    def usage(self, num_written: int) -> Usage:
        """Returns the usage once so many tokens of answers have been sent."""
        cached = sum(generation.num_cached_tokens or 0 for generation in self.generations)
        return usage(self.num_prompt_tokens, num_written, cached)

    @property
    def read(self) -> Read:
        """Returns what is new of any answer, one delta each, waiting for it; [] when all have ended.

        Raises ApiError 408 once what came in its client's time has been read. It is asked for each token, so
        nothing lies between a caller and a single generation.
        """
        read = self.generations[0].read if len(self.generations) == 1 else self._read_any
        return partial(self._read_in_time, read) if self._lease.has_timeout else read

    async def _read_in_time(self, read: Read) -> list[StreamDelta]:
        if self._is_late:
            raise self._lease.late()
        deltas = await read()
        self._is_late = any(map(_is_late, deltas))
        return [_unfinished(delta) if _is_late(delta) else delta for delta in deltas]

    async def _read_any(self) -> list[StreamDelta]:
        while self._unread:
            for number in self._unread.difference(self._reads.values()):
                self._reads[asyncio.ensure_future(self.generations[number].read())] = number
            done, _ = await asyncio.wait(self._reads, return_when=asyncio.FIRST_COMPLETED)
            if found := [delta for read in done for delta in self._taken(read)]:
                return found
        return []

    def _taken(self, read: asyncio.Future[list[StreamDelta]]) -> list[StreamDelta]:
        number = self._reads.pop(read)
        deltas = read.result()
        if not deltas:
            self._unread.discard(number)
        first = number * self.generations[number].num_answers
        return [dataclasses.replace(delta, index=first + delta.index) for delta in deltas]

    async def outputs(self) -> list[RequestOutput]:
        """Returns the whole of each prompt, in order; raises the error of the first that has one.

        Raises ApiError 408 where they did not end in their client's time.
        """
        outputs = [await generation.output() for generation in self.generations]
        if any(_is_late(answer) for output in outputs for answer in output.outputs):
            raise self._lease.late()
        return outputs

    async def aclose(self) -> None:
        """Ends what still runs and gives back what was leased; a second call does nothing."""
        for read in self._reads:
            if not read.cancel() and not read.cancelled():
                read.exception()  # seen: nobody else asks for it
        await self._lease.aclose()


def _is_late(ended: StreamDelta | CompletionOutput) -> bool:
    """Whether its time has passed; a stop string may have that name, too, but aborts nothing."""
    return ended.finish_reason == "abort" and ended.stop_reason == "deadline"


def _unfinished(delta: StreamDelta) -> StreamDelta:
    return dataclasses.replace(delta, finish_reason=None, stop_reason=None)
