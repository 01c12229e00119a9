"""The loop: schedule, execute, update, and the text of what came out; whole again after whatever hit it."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ...common.errors import EngineError, LaminaError, shown
from ...common.logging import get_logger
from ..executor.executor import Executor, StepHandle
from ..protocol.interrupts import InterruptAtRequestError
from ..protocol.runner_output import RunnerOutput
from ..protocol.scheduler_output import SchedulerOutput
from ..scheduler.faults import blamed
from ..scheduler.request import Request, Timeline
from ..scheduler.scheduler import Scheduler
from .latency import Latencies
from .output_processor import Generation, TextFaultError
from .suspects import Suspects

logger = get_logger("runtime")
T = TypeVar("T")


class Engine:
    """Steps every live request by one token or one chunk of its prompt at a time.

    `depth` steps are launched before the oldest is read: at 1 the host waits for each step, at 2 it plans
    the next one and writes the text of the last one while a step runs.

    Whatever interrupts a call, at any line, is followed by the books being opened anew from what the requests
    themselves say, there and then or before the next call. An error ends the request that it is due to.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, *, depth: int = 1) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._depth = depth
        self._is_whole = True  # the books: not while something happens to them
        self._at_model: SchedulerOutput | None = None  # the step that is being launched or read
        self._pending: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        self._generations: dict[str, Generation] = {}
        self._attentive: set[str] = set()  # those that want each token, not the answer alone
        self._suspects = Suspects()
        self.latencies = Latencies()
        self.first_token_seconds: float | None = None  # of the first request of all, from its arrival

    def add(self, generation: Generation) -> None:
        """Queue a request."""
        self._whole(partial(self._add, generation))

    def abort(self, request_id: str) -> bool:
        """End a request wherever it stands and give its blocks back; False for one that is not live."""
        return self._end(request_id, None)

    def fail(self, request_id: str, error: LaminaError) -> bool:
        """End a request alone, with an error for whoever asked; False for one that is not live."""
        return self._end(request_id, error)

    def step(self) -> None:
        """Launch a step if there is one, then take in the oldest, where enough are launched or none can be.

        An error ends the request that it is due to, who is told. Where nothing says whose it is, the step is
        tried again, and then the requests in it one by one. Raises what came from outside, as Ctrl-C.
        """
        try:
            self._whole(self._step)
        except InterruptAtRequestError as interrupt:
            self._end(interrupt.request_id, interrupt.failure)
            raise
        except Exception as error:
            self._whole(partial(self._answer_for, error))

    def count_whole(self, times: Timeline, num_tokens: int) -> None:
        """Count as one what was served by requests that were parts of it."""
        self.scheduler.num_finished += 1
        self.latencies.add(times, num_tokens)

    def idle(self) -> bool:
        """Record one more size where no request is live; False where there was nothing to do."""
        if self.scheduler.has_work or self._pending:
            return False
        return self._executor.capture_next()

    def forget_recordings(self) -> None:
        """Drop every recording; steps run without until idle() makes them again."""
        self._whole(self._finish_pending)
        self._executor.drop_captures()

    def close(self) -> None:
        """Abort every live request and shut the executor down."""
        for request_id in list(self._generations):
            self.abort(request_id)
        self._executor.shutdown()

    def _whole(self, action: Callable[[], T]) -> T:
        """Let something happen to the books; whatever interrupts it, they are whole again before the next."""
        if not self._is_whole:
            self._mend()
        self._is_whole = False
        try:
            result = action()
        except BaseException:
            self._mend()
            raise
        self._is_whole = True
        return result

    def _mend(self) -> None:
        """Make whole what an interrupt or an error left half done."""
        failed, self._at_model = self._at_model, None
        if failed is not None:  # at the device, while the books were whole
            self._undo(failed)
        else:
            self._pending.clear()
            self.scheduler.reopen()
        for request_id in self.scheduler.live_ids - self._generations.keys():
            self.scheduler.abort(request_id)
            self._executor.remove_request(request_id)
        for generation in [*self._generations.values()]:
            if generation.wants_each_token or generation.request.finish_reason is not None:
                self._tell(generation)
        self._is_whole = True

    def _answer_for(self, error: Exception) -> None:
        """End the request that an error is due to, once it is known."""
        culprit, cause = blamed(error)
        if culprit is None:
            culprit = self._suspects.accuse(self.scheduler.to_suspect())
            self._compute_alone(self._suspects.alone)
        if culprit is None:
            logger.warning("a step failed at no request in particular, and is tried again: %s", shown(cause))
            return
        failure = EngineError(f"a step failed at this request, which ends alone: {shown(cause)}")
        failure.__cause__ = cause
        self._cut_off(culprit.request_id, failure)

    def _end(self, request_id: str, error: LaminaError | None) -> bool:
        try:
            return self._whole(partial(self._abort, request_id, error))
        except Exception as failure:
            logger.warning("a request was cut off, as it could not be aborted: %s", shown(blamed(failure)[1]))
            return self._whole(partial(self._cut_off, request_id, error))

    def _cut_off(self, request_id: str, error: LaminaError | None) -> bool:
        """End a request whatever state it is in; everybody else is computed again."""
        generation = self._generations.get(request_id)
        if generation is None:
            return False
        self._pending.clear()
        self.scheduler.reopen(without=generation.request)
        self._tell_end(generation, error)
        return True

    def _compute_alone(self, request: Request | None) -> None:
        """From now on let one request alone be computed, or everybody."""
        if self.scheduler.alone is not request:
            self._pending.clear()
            self.scheduler.alone = request
            self.scheduler.reopen()

    def _add(self, generation: Generation) -> None:
        self.scheduler.add(generation.request)
        request_id, processors = generation.request.request_id, generation.request.params.logits_processors
        if processors:
            self._executor.add_request(request_id, processors)
        if generation.wants_each_token:
            self._attentive.add(request_id)
        self._generations[request_id] = generation

    def _abort(self, request_id: str, error: LaminaError | None = None) -> bool:
        generation = self._generations.get(request_id)
        if not self.scheduler.abort(request_id) or generation is None:
            return False
        self._tell_end(generation, error)
        if self._pending and not self.scheduler.has_work:
            self._finish_pending()
        return True

    def _step(self) -> None:
        if self._suspects and self._suspects.clear_innocent():
            self._compute_alone(self._suspects.alone)
        for request in self.scheduler.expire():
            self._tell(self._generations[request.request_id])
        if self.scheduler.needs_tokens:
            self._finish_pending()
        plan = self.scheduler.schedule()
        if plan is not None:
            self._launch(plan)
        depth = 1 if self._suspects else self._depth
        if self._pending and (plan is None or len(self._pending) >= depth):
            self._take_in_oldest()
        if not self.scheduler.has_work:
            self._finish_pending()

    def _launch(self, plan: SchedulerOutput) -> None:
        self._at_model = plan
        handle = self._executor.execute(plan)
        if handle.error is not None:
            raise handle.error
        self._pending.append((plan, handle))
        self._at_model = None

    def _finish_pending(self) -> None:
        """Wait for every step in flight: for its tokens, or so that every block is free."""
        while self._pending:
            self._take_in_oldest()

    def _take_in_oldest(self) -> None:
        plan, handle = self._pending[0]
        self._at_model = plan
        output = handle.result()
        if output.error is not None:
            raise output.error
        self._at_model = None
        self._pending.popleft()
        for request_id, error in output.failures.items():
            if self.scheduler.abort(request_id):
                self._tell_end(self._generations[request_id], error)
        self._take_in(plan, output)

    def _undo(self, failed: SchedulerOutput) -> None:
        while self._pending and self._pending[-1][0].step >= failed.step:
            self._pending.pop()
        self.scheduler.discard(failed)

    def _take_in(self, plan: SchedulerOutput, output: RunnerOutput) -> None:
        received = self.scheduler.update(plan, output.token_ids, output.reports)
        if self.first_token_seconds is None and received:
            self.first_token_seconds = _seconds_to_first_token(received[0])
        for request in received:
            if request.finish_reason is not None or request.request_id in self._attentive:
                self._tell(self._generations[request.request_id])

    def _tell(self, generation: Generation) -> None:
        """Let callers read a request's newest tokens, and its end where it has ended."""
        request = generation.request
        try:
            stop = generation.read()
            if stop is not None:
                self._stop_at_string(request, stop)
            generation.tell()
        except TextFaultError as fault:
            self._fail_at_text(generation, fault.__cause__)
        if request.finish_reason is not None:
            self._forget(request.request_id)
            if request.finish_reason != "abort" and request.is_counted:
                self.latencies.add(request.times, len(request.output_token_ids))

    def _tell_end(self, generation: Generation, error: LaminaError | None) -> None:
        """Let callers know that a request was ended, and by what error, if any."""
        if error is None:
            self._tell(generation)
        else:
            generation.tell_failure(error)
            self._forget(generation.request.request_id)

    def _fail_at_text(self, generation: Generation, error: BaseException | None) -> None:
        failure = EngineError(f"the text of this answer could not be made: {shown(error)}")
        failure.__cause__ = error
        self.scheduler.abort(generation.request.request_id)
        self._tell_end(generation, failure)

    def _forget(self, request_id: str) -> None:
        self._executor.remove_request(request_id)
        self._attentive.discard(request_id)
        self._generations.pop(request_id, None)

    def _stop_at_string(self, request: Request, stop: str) -> None:
        """A stop string wins over a length that the same token reached."""
        if request.finish_reason is None:
            self.scheduler.finish(request.request_id, "stop", stop)
        else:
            self.scheduler.restate(request, "stop", stop)


def _seconds_to_first_token(request: Request) -> float | None:
    queued, first_token = request.times.queued, request.times.first_token
    return None if queued is None or first_token is None else first_token - queued
