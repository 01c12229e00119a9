"""The blocking client of a core: one caller at a time, and what was dropped meanwhile is ended first."""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from ...common.errors import ClosedError, RequestError
from ...common.forks import require_same_process
from ...compiler.torch_internals.torch_section import as_written, neutral
from ...custom_ops._shared.ledger import Watcher, watched
from ..protocol.engine_output import Timeline
from .engine_core import EngineCore
from .first_step import FirstStep
from .output_processor import Answer, OutputProcessor, Reader, Submission
from .outputs import RequestOutput, StreamDelta
from .parallel_sampling import ParentRequest, new_deltas

T = TypeVar("T")
ASLEEP_SECONDS = 0.05  # between two looks at deadlines while the core sleeps


def runtime_closed() -> ClosedError:
    """What a closed runtime answers to whoever asks it for anything."""
    return ClosedError("this runtime was closed; make a new one with Runtime.from_pretrained")


class Ticket:
    """Held by whoever asked for something: what it stands for is ended when nobody has it any more."""

    __slots__ = ("__weakref__", "reference")

    reference: "weakref.ref[Ticket] | None"

    def __init__(self) -> None:
        self.reference = None


class Client:
    """Lets one thread at a time step the core and process its outputs, and nobody while it is inside.

    Who waits for an answer steps the core himself until it is over, and everybody's answers with it. Text is
    made after a step, so with several steps in flight it is made while the next one runs on the device.

    Whoever drops a stream, be it the garbage collector at any line of any thread, only puts its ticket's
    reference into a queue, which takes one call of C: no lock, and nothing that could be interrupted. The
    next to enter or to leave ends what the queue names.

    Every call raises ClosedError after close(), UnsupportedError in a forked child, and, but for look() and
    drop(), RequestError from inside of another call, as from a logits processor.
    """

    def __init__(self, core: EngineCore, on_build: Watcher, first_step: FirstStep | None = None) -> None:
        """on_build: called with the name of what is built in the middle of a request; it may raise.

        first_step: what is launched before all of a call is made; None where a step is waited for.
        """
        self._core: EngineCore | None = core  # None once all of it is given back
        self._first_step = first_step
        self._is_closed = False
        self._processor = OutputProcessor()
        self._on_build = on_build
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._inside = threading.Lock()  # held by the thread that has the other while it is inside
        self._asked: dict[weakref.ref[Ticket], tuple[str, ...]] = {}  # request ids
        self._dropped: deque[weakref.ref[Ticket]] = deque()
        self._awake = threading.Event()  # not while the core sleeps
        self._awake.set()
        self._put_to_sleep_by: int | None = None  # the thread that did, while it sleeps

    def run(self, submissions: Sequence[Submission]) -> None:
        """Sees these to their ends; raises the error of the first that has one, and ends the others."""
        ticket = Ticket()
        try:
            self.submit(ticket, submissions)
            for _, answer in submissions:
                self._finish(answer)
        finally:
            self.drop(ticket)

    def outputs_of(self, asked: Iterable[ParentRequest]) -> list[RequestOutput]:
        """Sees requests to their ends as run() does; returns their outputs, in order.

        Where the device has nothing to do, those that fill a step are begun with before the others are made.
        What making one raises ends all. An output is made while the device computes the next ones.
        """
        ticket, requests = Ticket(), iter(asked)
        try:
            first = self._begin(ticket, requests)
            others = [*requests]
            if others:
                self.submit(ticket, _submissions_of(others))
            return [self._output_of(each) for each in (*first, *others)]
        finally:
            self.drop(ticket)

    def stream(self, submissions: Sequence[Submission]) -> Iterator[StreamDelta]:
        """Yields the pieces of these in turns, as they are written; queues them when the first is asked for.

        To close the iterator, or to drop it, ends what is left of them.
        """
        ticket, readers = Ticket(), [Reader(answer) for _, answer in submissions]
        try:
            self.submit(ticket, submissions)
            while True:
                yield from new_deltas(readers)
                for reader in readers:
                    if reader.error is not None:
                        raise reader.error
                if all(reader.is_done for reader in readers):
                    return
                self.step()
        finally:
            self.drop(ticket)

    @as_written  # stream() calls it from the caller's own frame
    def submit(self, ticket: Ticket, submissions: Sequence[Submission]) -> None:
        """Queues requests, to be ended when the ticket is dropped."""
        self.enter(lambda core: self._submit(core, ticket, submissions))

    @as_written
    def step(self) -> None:
        """Steps the core once and processes its outputs; while it sleeps waits a little for its waking."""
        self.enter(self._step)
        self._awake.wait(ASLEEP_SECONDS)

    def abort(self, request_id: str) -> bool:
        """Ends a request wherever it stands; False for one that is not live."""
        return self.enter(lambda core: self._abort(core, request_id))

    @as_written
    def drop(self, ticket: Ticket) -> None:
        """Ends what is left of a ticket's requests: soon, as this may be called anywhere."""
        if ticket.reference is not None:
            self._dropped.append(ticket.reference)

    def idle(self) -> bool:
        """Captures one more size; False where none is left, or a request is live."""
        return self.enter(self._idle)

    def drop_captures(self) -> None:
        """Drops every captured graph, which idle() captures again; RequestError while requests are live."""
        self.enter(EngineCore.drop_captures)

    def sleep(self, level: int) -> None:
        """Gives the device's memory back; whoever steps waits until wake()."""
        self.enter(lambda core: self._lulled(core, lambda: core.sleep(level)))

    def update_weights(self, kind: str, value: Any) -> None:
        """Replaces weights; where that leaves the core asleep, who steps waits for wake()."""
        self.enter(lambda core: self._lulled(core, lambda: core.update_weights(kind, value)))

    def wake(self, *, capture: bool) -> None:
        """Takes the device's memory again, and lets those step who wait."""
        self.enter(lambda core: self._wake(core, capture))

    def count_whole(self, times: Timeline, num_tokens: int) -> None:
        """Counts as one what was served by requests that were parts of it."""
        self.enter(lambda core: core.count_whole(times, num_tokens))

    def close(self) -> None:
        """Ends every request and shuts the core down; a second call does nothing."""
        self._locked(self._close)

    def enter(self, action: Callable[[EngineCore], T]) -> T:
        """Lets one thread at a time do something to the core; returns what the action does."""
        return self._locked(lambda: action(self._open_core()))

    def look(self, read: Callable[[], T]) -> T:
        """Returns what read() does of what is changed inside: as it is, where this thread is inside."""
        require_same_process(self._pid)
        with self._lock: return self._enter(read) if not self._inside.locked() else read()  # fmt: skip # noqa: E701

    def _locked(self, action: Callable[[], T]) -> T:
        require_same_process(self._pid)  # whose lock a thread may hold that is not there
        # On one line: an interrupt on the way back from a second one to the first would keep the lock.
        with self._lock: return self._enter(action)  # fmt: skip # noqa: E701

    def _enter(self, action: Callable[[], T]) -> T:
        if self._inside.locked():
            raise RequestError(
                "this runtime was called from inside one of its own steps, as by a logits processor, a "
                "tokenizer or a signal handler of yours; call it when the step is over"
            )
        with self._inside: return self._between_ends(action)  # fmt: skip # noqa: E701

    def _between_ends(self, action: Callable[[], T]) -> T:
        with neutral():  # what a caller set for tensors of his own is not ours
            try:
                self._end_dropped()
                return action()
            finally:
                self._end_dropped()

    def _open_core(self) -> EngineCore:
        if self._is_closed or self._core is None:
            raise runtime_closed()
        return self._core

    def _begin(self, ticket: Ticket, requests: Iterator[ParentRequest]) -> list[ParentRequest]:
        """Takes and launches what fills a step, unless somebody else has the core; returns what it took."""
        step = self._first_step  # once: another thread may close
        if step is None or self._inside.locked():
            return []
        first = step.take(requests)
        self.enter(lambda core: self._submit_and_launch(core, ticket, _submissions_of(first)))
        return first

    def _submit_and_launch(self, core: EngineCore, ticket: Ticket, submissions: Sequence[Submission]) -> None:
        is_free = not (core.has_work or core.is_asleep)
        self._submit(core, ticket, submissions)
        if is_free:
            self._step(core)

    def _output_of(self, asked: ParentRequest) -> RequestOutput:
        for answer in asked.answers:
            self._finish(answer)
        return asked.output()

    def _finish(self, answer: Answer) -> None:
        """Steps until an answer is over; raises its error if it has one."""
        while not answer.published.is_over:
            self.step()
        if answer.error is not None:
            raise answer.error

    def _submit(self, core: EngineCore, ticket: Ticket, submissions: Sequence[Submission]) -> None:
        reference = ticket.reference or weakref.ref(ticket, self._dropped.append)
        request_ids = (request.request_id for request, _ in submissions)
        self._asked[reference] = (*self._asked.get(reference, ()), *request_ids)
        ticket.reference = reference
        for request, answer in submissions:
            self._processor.add(answer)
            core.add(request)

    def _step(self, core: EngineCore) -> None:
        self._deliver(core)  # what an interrupt may have left
        if core.is_asleep and self._put_to_sleep_by == threading.get_ident():
            raise RequestError(
                "this runtime sleeps, and whoever put it to sleep asks it for an answer; call wake() first"
            )
        with watched(self._on_build):
            core.step()
        self._deliver(core)

    def _abort(self, core: EngineCore, request_id: str) -> bool:
        was_live = core.abort(request_id)
        self._deliver(core)
        return was_live

    def _idle(self, core: EngineCore) -> bool:
        with watched(self._on_build):
            return core.idle()

    def _lulled(self, core: EngineCore, action: Callable[[], None]) -> None:
        """Does what may leave the core asleep."""
        try:
            action()
        finally:
            if core.is_asleep:
                self._put_to_sleep_by = threading.get_ident()
                self._awake.clear()
            self._deliver(core)

    def _wake(self, core: EngineCore, capture: bool) -> None:
        with watched(self._on_build):
            core.wake(capture=capture)
        self._put_to_sleep_by = None
        self._awake.set()

    def _close(self) -> None:
        self._awake.set()
        self._is_closed, core = True, self._core
        if core is not None:  # also where an interrupt cut a first call short
            core.close()
            self._deliver(core)
            self._core = self._first_step = None

    def _deliver(self, core: EngineCore) -> None:
        """Processes the core's outputs, and ends what needs no more of it, until it has no news.

        An output leaves the queue when all that follows from it was done, so an interrupt loses none; to
        process one again changes nothing.
        """
        while core.outputs:
            outputs = [*core.outputs]
            for request_id, stop_string in self._processor.process(outputs):
                core.abort(request_id, "abort" if stop_string is None else "stop", stop_string)
            for _ in outputs:
                core.outputs.popleft()

    def _end_dropped(self) -> None:
        while self._dropped:
            reference = self._dropped[0]
            for request_id in self._asked.get(reference, ()):
                if self._core is not None:
                    self._core.abort(request_id)
                self._processor.forget(request_id)
            self._asked.pop(reference, None)
            self._dropped.popleft()


def _submissions_of(asked: Iterable[ParentRequest]) -> list[Submission]:
    return [submission for each in asked for submission in each.submissions]
