"""The asyncio client of a core that runs elsewhere: its loop's thread makes the text, and wakes who reads."""

import asyncio
import itertools
import math
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...common.errors import EngineDeadError, LaminaError, RequestError, UnsupportedError
from ..protocol.core_messages import AbortRequests, AddRequests, Call, CoreStatus, Reply, StepOutputs
from ..protocol.engine_output import EngineOutput, Finish, FinishReason, Timeline
from .core_handle import CoreHandle, EngineState, SeveralCores
from .generation import Generation, GenerationState
from .inbox import Inbox
from .listeners import EngineListener, FinishedRequest, Listeners
from .output_processor import OutputProcessor, Submission
from .parallel_sampling import ParentRequest

__all__ = ["AsyncClient", "EngineListener", "FinishedRequest", "EngineHealth", "Generation", "Health"]
NUM_AT_ONCE = 64  # outputs that are made text before the time is looked at


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """Whether a runtime can answer; if not, `reason` says why."""

    ok: bool
    reason: str | None
    status: CoreStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineHealth:
    """How one engine is."""

    number: int  # from 0
    state: EngineState
    health: Health
    num_requests: int | None = None  # that it has; None where there is no other engine
    num_given: int = 0  # requests since the start, where there are several
    num_given_by_prefix: int = 0  # of these, since it knew how they begin

    @property
    def takes_requests(self) -> bool:
        """Whether new requests may be given to it."""
        return self.state == "serving"


class AsyncClient:
    """Asks a core that runs elsewhere, and writes its outputs into answers. One event loop at a time uses it.

    The core's thread only leaves a message a step and wakes the loop. All else happens in the loop's thread.
    """

    def __init__(self, handle: CoreHandle, step_timeout: float) -> None:
        """step_timeout: seconds after which a step counts as hanging, unless something is built in it."""
        self._handle = handle
        self._several = handle if isinstance(handle, SeveralCores) else None  # slow to ask for each request
        self._step_timeout = step_timeout
        self._processor = OutputProcessor()
        self._live: dict[str, tuple[GenerationState, Submission]] = {}  # by the core's id, until ended
        self._asked: dict[weakref.ref[Generation], GenerationState] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._notified: dict[Callable[[], None], None] = {}  # who is to be called as there is something new
        self._num_taken = 0  # of the outputs of the first message
        self._numbers = itertools.count()
        self._listeners = Listeners()
        self._end: LaminaError | None = None  # why no more can be asked
        self._inbox = Inbox(self, asyncio.get_running_loop())
        handle.start(self._inbox.put)

    @property
    def takes_objects(self) -> bool:
        """See CoreHandle."""
        return self._handle.takes_objects

    def generate(self, parent: ParentRequest) -> Generation:
        """Queues what is to be written to a prompt; returns it as it is written."""
        self._require_usable()
        requests = tuple(request for request, _ in parent.submissions)
        if requests[0].params.logits_processors and not self._handle.takes_objects:
            raise UnsupportedError(
                "logits_processors are objects of this process, and the engine is in another; use "
                "AsyncRuntime.from_pretrained(model, engine='thread')"
            )
        state = GenerationState(parent, time.monotonic())
        generation = Generation(state, self.end)
        state.reference = weakref.ref(generation, self._inbox.drop)
        self._asked[state.reference] = state
        for submission in parent.submissions:
            self._live[submission.request.request_id] = state, submission
            self._processor.add(submission.answer)
        try:
            state.engine = self._handle.send(AddRequests(requests=requests))
        except BaseException:  # as for what cannot be sent to another process: the core knows nothing of it
            self._forget(state)
            raise
        for submission in parent.submissions:
            submission.answer.prepare()
        return generation

    def abort(self, asked_id: str) -> bool:
        """Has every answer of that caller's id ended, within a step; False where none is live."""
        found = [own for own, (_, submission) in self._live.items() if submission.answer.asked_id == asked_id]
        if found:
            self._handle.send(AbortRequests(request_ids=tuple(found)))
        return bool(found)

    def end(self, state: GenerationState) -> None:
        """Ends what nobody reads any more: no more text is made of it."""
        own = (each.request.request_id for each in state.parent.submissions)
        live = [request_id for request_id in own if request_id in self._live]
        for request_id in live:
            self._processor.forget(request_id)
        if live:
            self._handle.send(AbortRequests(request_ids=tuple(live)))

    def _forget(self, state: GenerationState) -> None:
        """Strikes from the books what the core does not know, or has ended."""
        for request, _ in state.parent.submissions:
            self._live.pop(request.request_id, None)
            self._processor.forget(request.request_id)
        if state.reference is not None:
            self._asked.pop(state.reference, None)

    def fail(self, error: LaminaError) -> None:
        """Ends every request by an error, at once; the core goes on."""
        request_ids = tuple(self._live)
        self._end_all(error)
        self._handle.send(AbortRequests(request_ids=request_ids))

    async def call(self, method: str, *arguments: Any, engine: int | None = None) -> Any:
        """Returns what a method of the core's loop returns, between two steps.

        engine: which of several is asked, where that is not all.
        """
        self._require_usable()
        number = next(self._numbers)
        reply = self._calls[number] = asyncio.get_running_loop().create_future()
        self._handle.send(Call(number=number, method=method, arguments=arguments, engine=engine))
        try:
            return await reply
        finally:
            self._calls.pop(number, None)

    def listen(self, listener: EngineListener) -> None:
        """Sends a listener what becomes of requests from now on."""
        self._listeners.add(listener)

    def health(self) -> Health:
        """Returns whether a request could be answered now; never waits."""
        return self._health_of(self._handle.status())

    def engines(self) -> tuple[EngineHealth, ...]:
        """Returns how each engine is; otherwise as health()."""
        if self._several is None:
            health = self.health()
            return (
                EngineHealth(number=0, state="serving" if health.status.is_alive else "lost", health=health),
            )
        return tuple(
            EngineHealth(
                number=report.number,
                state=report.state,
                health=self._health_of(report.status),
                num_requests=report.num_requests,
                num_given=report.num_given,
                num_given_by_prefix=report.num_given_by_prefix,
            )
            for report in self._several.reports()
        )

    @property
    def num_taking(self) -> int:
        """Engines that take requests; one, that will again, where none does now."""
        return 1 if self._several is None else max(1, self._several.num_taking())

    @property
    def several(self) -> SeveralCores:
        """The handle, where it is one of several engines; RequestError where there is one."""
        self._require_usable()
        if self._several is None:
            raise RequestError("there is one engine; wanted several, by data_parallel")
        return self._several

    def _health_of(self, status: CoreStatus) -> Health:
        reason = status.reason if self._end is None else str(self._end)
        if reason is None and status.building is None and (status.step_seconds or 0.0) > self._step_timeout:
            reason = (
                f"a step has been running for {status.step_seconds:.1f} s, above {self._step_timeout:g} s"
            )
        ok = status.is_alive and reason is None
        return Health(ok=ok, reason=reason, status=status)

    async def close(self, error: LaminaError, timeout: float) -> None:
        """Ends every request and the core; whoever asks for anything from now on gets the error."""
        if self._end is None:
            self._end = error
        await asyncio.to_thread(self._handle.close, timeout)
        self.deliver()

    def abandon(self, request_ids: Sequence[str]) -> None:
        """Ends requests whose event loop is closed; any thread may call."""
        self._handle.send(AbortRequests(request_ids=tuple(request_ids)))

    def deliver(self, seconds: float = math.inf) -> bool:
        """Takes in what has come, for so long and a few outputs more; in the loop's thread.

        Returns whether any is left. A core that is faster than its outputs are made text would keep the loop
        from ever doing anything else.
        """
        self._end_dropped()
        messages, until = self._inbox.messages, time.monotonic() + seconds
        while messages:
            message = messages[0]  # stays until it is dealt with, as an interrupt may come
            if message is None:
                self._lose()
            elif isinstance(message, StepOutputs):
                self._take_part(message.outputs)
                if self._num_taken < len(message.outputs):
                    if time.monotonic() >= until:
                        break
                    continue
                self._num_taken = 0
            else:
                self._take_reply(message)
            messages.popleft()
            if messages:
                self._listeners.tell()
            if time.monotonic() >= until:
                break
        while self._notified:
            notified, self._notified = self._notified, {}
            for on_news in notified:
                on_news()
        self._listeners.tell()
        return bool(messages)

    def _require_usable(self) -> None:
        if self._end is not None:
            raise self._end.with_traceback(None)
        loop, own = asyncio.get_running_loop(), self._inbox.loop
        if loop is own:
            return
        if not own.is_closed():
            raise RequestError(
                "this AsyncRuntime is used from another event loop than the one that it serves; make one in "
                "each, or hand over by asyncio.run_coroutine_threadsafe"
            )
        self._move_to(loop)

    def _move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serves another loop from now on; what the closed one has left behind ends."""
        self._inbox.move_to(loop)
        for state in [*self._asked.values()]:
            state.waiters.clear()  # futures of the closed loop, which would refuse to be woken
            state.on_news = None
            self.end(state)
        self.deliver()

    def _end_dropped(self) -> None:
        dropped = self._inbox.dropped
        while dropped:
            state = self._asked.get(dropped.popleft())
            if state is not None:
                self.end(state)

    def _take_part(self, outputs: Sequence[EngineOutput]) -> None:
        """Takes in the next few outputs of the first message: stop strings may cost much of each."""
        if not self._num_taken:
            self._tell_outputs(outputs)
        self._take_in(outputs[self._num_taken : self._num_taken + NUM_AT_ONCE])
        self._num_taken += NUM_AT_ONCE

    def _tell_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        if self._listeners:
            now = time.monotonic()
            self._listeners.note(lambda listener: listener.outputs(outputs, now))

    def _take_in(self, outputs: Sequence[EngineOutput]) -> None:
        for stop in self._processor.process(outputs):
            reason: FinishReason = "abort" if stop.stop_string is None else "stop"
            command = AbortRequests(
                request_ids=(stop.request_id,), reason=reason, stop_reason=stop.stop_string
            )
            self._handle.send(command)
        live, notified = self._live, self._notified
        for output in outputs:
            found = live.get(output.request_id)
            if found is None:
                continue
            if output.finish is not None:
                self._finish(output)
            state = found[0]
            if state.on_news is not None:
                notified[state.on_news] = None
            if state.waiters:
                state.wake()

    def _finish(self, output: EngineOutput) -> None:
        state, (request, answer) = self._live.pop(output.request_id)
        state.num_left -= 1
        if not state.num_left and state.reference is not None:
            self._asked.pop(state.reference, None)
        finish, published = output.finish, answer.published
        assert finish is not None
        if not (self._listeners and request.is_counted):
            return
        num_output_tokens = output.num_before + len(output.new_token_ids)
        done = FinishedRequest(
            request_id=answer.asked_id,
            index=answer.index,
            times=finish.times,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_output_tokens=published.num_tokens if published.is_over else num_output_tokens,
            num_cached_tokens=finish.num_cached_tokens,
            num_preemptions=finish.num_preemptions,
            finish_reason=answer.finish_reason or finish.reason,
            max_tokens=request.params.max_tokens,
            n=len(state.parent.submissions),
            error=answer.error or finish.error,
        )
        self._listeners.note(lambda listener: listener.finished(done))

    def _take_reply(self, reply: Reply) -> None:
        waiting = self._calls.get(reply.number)
        if waiting is None or waiting.done():
            return
        if reply.error is not None:
            waiting.set_exception(reply.error)
        else:
            waiting.set_result(reply.value)

    def _lose(self) -> None:
        """The core is gone: whatever is left of requests and calls ends by an error."""
        lost = EngineDeadError(
            f"the engine's core is lost: {self._handle.status().reason}; make a new AsyncRuntime"
        )
        self._end = self._end or lost
        for number in [*self._calls]:
            self._take_reply(Reply(number=number, error=self._end))
        self._end_all(lost)

    def _end_all(self, error: LaminaError) -> None:
        now = time.monotonic()
        ended = [_ended(state, submission, error, now) for state, submission in self._live.values()]
        self._tell_outputs(ended)
        self._take_in(ended)
        self._listeners.tell()


def _ended(state: GenerationState, submission: Submission, error: LaminaError, now: float) -> EngineOutput:
    """What the core would have said of a request that ended by an error."""
    times = Timeline(queued=state.queued, finished=now)
    return EngineOutput(
        request_id=submission.request.request_id,
        num_before=len(submission.answer.token_ids),
        finish=Finish(reason="abort", times=times, error=error),
    )
