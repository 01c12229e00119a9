"""Generations that answer one HTTP request: read as one, ended together."""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...runtime.engine.outputs import CompletionOutput, RequestOutput, StreamDelta
from ..protocol.usage import Usage, usage

if TYPE_CHECKING:
    from ...runtime.engine.generation import Generation
    from ...runtime.engine.output_processor import Reader
    from ..admission.lease import Lease


NUM_AT_ONCE = 16  # whole outputs that are made before the loop comes round


class Running:
    """One generation a prompt; answer a of prompt p, of n answers each, has the index p * n + a."""

    def __init__(self, generations: Sequence["Generation"], lease: "Lease") -> None:
        """lease: what admission gave for them, which ends them and is released with them."""
        self.generations = tuple(generations)
        self._turns = deque(enumerate(self.generations))  # in which they are read
        self._only = self.generations[0] if len(self.generations) == 1 else None
        self._lease, self._has_timeout = lease, lease.has_timeout
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

    def notify(self, on_news: Callable[[], None] | None) -> None:
        """Has on_news() called when there is something new of any answer; None: no more."""
        for generation in self.generations:
            generation.notify(on_news)

    @property
    def only_reader(self) -> "Reader | None":
        """Who reads the only answer there is, None where there are several: what it reads is read."""
        return None if self._only is None else self._only.only_reader

    def read_nowait(self, most: int) -> list[StreamDelta]:
        """Returns what is new of any answer, one delta each and so many tokens at most; [] where nothing is.

        Raises the error of an answer, and ApiError 408 once what came in its client's time has been read.
        """
        if self._is_late:
            raise self._lease.late()
        deltas = self._read_any(most) if self._only is None else self._only.read_nowait(most)
        if self._has_timeout and any(map(_is_late, deltas)):
            self._is_late = True
            return [_unfinished(delta) if _is_late(delta) else delta for delta in deltas]
        return deltas

    @property
    def is_read(self) -> bool:
        """Whether there is nothing more to wait for: read_nowait() returns [], or raises what ended it."""
        if self._only is not None and not self._is_late:
            return self._only.is_read
        return self._is_late or all(generation.is_read for generation in self.generations)

    def _read_any(self, most: int) -> list[StreamDelta]:
        deltas: list[StreamDelta] = []
        for _ in self.generations:
            number, generation = self._turns[0]
            for delta in generation.read_nowait(most):
                delta.index += number * generation.num_answers
                deltas.append(delta)
                most -= len(delta.token_ids)
            self._turns.rotate(-1)
            if most <= 0:
                break
        return deltas

    async def outputs(self) -> list[RequestOutput]:
        """Returns the whole of each prompt, in order; raises the error of the first that has one.

        Raises ApiError 408 where they did not end in their client's time.
        """
        outputs = []
        for generation in self.generations:
            outputs.append(await generation.output())
            if len(outputs) % NUM_AT_ONCE == 0:
                await asyncio.sleep(0)
        if any(_is_late(answer) for output in outputs for answer in output.outputs):
            raise self._lease.late()
        return outputs

    async def aclose(self) -> None:
        """Ends what still runs and gives back what was leased; a second call does nothing."""
        await self._lease.aclose()


def _is_late(ended: StreamDelta | CompletionOutput) -> bool:
    """Whether its time has passed; a stop string may have that name, too, but aborts nothing."""
    return ended.finish_reason == "abort" and ended.stop_reason == "deadline"


def _unfinished(delta: StreamDelta) -> StreamDelta:
    return dataclasses.replace(delta, finish_reason=None, stop_reason=None)
