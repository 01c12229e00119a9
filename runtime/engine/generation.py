"""The answers to one prompt as a task of asyncio reads them, piece by piece or whole."""

import asyncio
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Self

from ...common.errors import ClosedError
from ..protocol.engine_output import Timeline
from .output_processor import Answer, Reader
from .outputs import RequestOutput, StreamDelta
from .parallel_sampling import ParentRequest

MOST_LOGPROBS = 1024  # tokens whose log-probabilities are made a caller's in the loop's thread


class GenerationState:
    """What a generation shares with its client: who waits for answers, and how many have not ended."""

    __slots__ = ("engine", "num_left", "on_news", "parent", "queued", "reference", "waiters")

    def __init__(self, parent: ParentRequest, now: float) -> None:
        self.parent = parent
        self.num_left = len(parent.submissions)
        self.queued = now
        self.engine: int | None = None
        self.waiters: list[asyncio.Future[None]] = []
        self.on_news: Callable[[], None] | None = None
        self.reference: weakref.ref[Generation] | None = None

    def news(self) -> asyncio.Future[None]:
        """Returns what is done when there is something new."""
        waiter = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        return waiter

    def wake(self) -> None:
        """Let whoever waits look again."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Generation:
    """The answers to one prompt as they are written: to be iterated, read, or awaited as a whole.

    It ends within a step when it is closed or dropped, or when a task that waits for it is cancelled. An
    error of an answer is raised once what came before it has been read; the other answers end then.
    """

    def __init__(self, state: GenerationState, end: Callable[[GenerationState], None]) -> None:
        """end(state): has what is left of it ended; it holds the client, which lives as long as this."""
        self._state, self._end = state, end
        self._parent = state.parent
        self._readers = deque(map(Reader, self._parent.answers))  # that have not read all, in turns
        self._has_failed = False  # an answer that has been read to its end
        self._ready: deque[StreamDelta] = deque()  # read, and not yet given out by iteration
        self._is_closed = False
        self._is_chosen = len(self._parent.submissions) > self._parent.num_wanted  # from more, at the end

    @property
    def request_id(self) -> str:
        """The id that the caller gave, or the one that it got."""
        return self._parent.answers[0].asked_id

    @property
    def engine(self) -> int | None:
        """The number of the engine that has it; None where there is one engine."""
        return self._state.engine

    @property
    def prompt(self) -> str | None:
        """The prompt's text, None where token ids were given."""
        return self._parent.prompt

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt's token ids."""
        return self._parent.submissions[0].request.prompt_token_ids

    @property
    def num_answers(self) -> int:
        """Answers that output() has."""
        return self._parent.num_wanted

    @property
    def num_output_tokens(self) -> int:
        """Tokens that may be read so far, of all answers together."""
        return sum(answer.published.num_tokens for answer in self._parent.answers)

    @property
    def num_cached_tokens(self) -> int | None:
        """Tokens of the prompt that were in the prefix cache; None until an answer has ended."""
        finish = next((a.finish for a in self._parent.answers if a.finish is not None), None)
        return None if finish is None else finish.num_cached_tokens

    @property
    def is_over(self) -> bool:
        """Whether every answer has ended, read or not."""
        return all(answer.published.is_over for answer in self._parent.answers)

    @property
    def texts(self) -> list[str]:
        """The text of each answer, as far as it is certain."""
        return [answer.text for answer in self._parent.answers]

    @property
    def timelines(self) -> list[Timeline]:
        """When things happened to each answer that the engine has ended."""
        return [answer.finish.times for answer in self._parent.answers if answer.finish is not None]

    @property
    def ends(self) -> list[str]:
        """Why each answer that has ended or was closed did so: its finish_reason, or "error"."""
        ended = [answer for answer in self._parent.answers if answer.published.is_over or self._is_closed]
        return ["error" if answer.error is not None else answer.finish_reason or "abort" for answer in ended]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamDelta:
        if not self._ready:
            self._ready.extend(await self.read())
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    async def read(self) -> list[StreamDelta]:
        """Returns all that is new, one delta an answer, and waits while nothing is; [] once all have ended.

        RequestError with best_of above n, whose answers are known at the end: await output().
        """
        while not (deltas := self.read_nowait()) and not self.is_read:
            try:
                await self._state.news()
            except BaseException:  # cancelled, or the coroutine was dropped
                self._close()
                raise
        return deltas

    def read_nowait(self, most: int = sys.maxsize) -> list[StreamDelta]:
        """Returns all that is new, one delta an answer; [] where nothing is. Otherwise as read().

        most: so many tokens at most; the rest is there for the next call.
        """
        if self._is_chosen:
            self._parent.require_streamable()
        if self._ready:
            deltas, self._ready = [*self._ready], deque()
            return deltas
        if self._is_closed:
            return []
        deltas = self._new_deltas(most)
        if self._has_failed and not deltas:
            self._raise_error()
        return deltas

    @property
    def is_read(self) -> bool:
        """Whether there is nothing more to wait for: read_nowait() returns [], or raises what ended it."""
        return not (self._readers or self._ready) or self._has_failed or self._is_closed

    @property
    def only_reader(self) -> Reader | None:
        """Who reads its answer, if that is the only one and there is more to be read.

        For programs that read very many: a text that is got by Reader.read_text() is not read again.
        """
        is_only = len(self._parent.submissions) == len(self._readers) == 1
        return self._readers[0] if is_only else None

    def notify(self, on_news: Callable[[], None] | None) -> None:
        """Has on_news() called, in the loop's thread, when there is something new; None: no more.

        For programs that read very many: it costs a call where a task that waits would be woken. One that
        several have in common is called once for all that came together. It must not raise, and whatever
        it holds is held until the end.
        """
        self._state.on_news = on_news

    async def output(self) -> RequestOutput:
        """Returns the prompt with its whole answers, once all have ended, whatever was read before."""
        await self.ended()
        if sum(map(_num_logprobs, self._parent.answers)) > MOST_LOGPROBS:
            return await asyncio.to_thread(self._parent.output)
        return self._parent.output()

    async def ended(self) -> None:
        """Waits until every answer has ended; raises the error of the first that has one."""
        while not self.is_over:
            if self._is_closed:
                raise ClosedError("this generation was closed before it had ended")
            self._raise_error()
            try:
                await self._state.news()
            except BaseException:
                self._close()
                raise
        self._raise_error()

    async def aclose(self) -> None:
        """Ends what is left of it: nothing more can be read, and output() raises ClosedError."""
        self._close()

    def _new_deltas(self, most: int) -> list[StreamDelta]:
        """Returns what is new of each answer, and is done with those that have been read to their ends."""
        deltas, readers = [], self._readers
        for _ in range(len(readers)):
            reader = readers[0]
            delta = reader.read(most)
            if delta is not None:
                deltas.append(delta)
                most -= len(delta.token_ids)
            if reader.is_done:
                self._has_failed |= reader.error is not None
                readers.popleft()
            else:
                readers.rotate(-1)
            if most <= 0:
                break
        return deltas

    def _raise_error(self) -> None:
        """Raises the error of the first answer that has one, and ends the others."""
        error = next((a.error for a in self._parent.answers if a.error is not None), None)
        if error is not None:
            self._end(self._state)
            raise error.with_traceback(None)

    def _close(self) -> None:
        self._is_closed = True
        self._ready.clear()
        self._state.on_news = None
        self._end(self._state)
        self._state.wake()


def _num_logprobs(answer: Answer) -> int:
    return len(answer.logprobs) + len(answer.prompt_logprobs)
