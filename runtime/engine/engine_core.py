"""The core of the engine: schedule, execute, update; whole again after whatever hit it. It knows no text."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from ...common.errors import EngineDeadError, EngineError, LaminaError, RequestError, shown
from ...common.logging import get_logger
from ..executor.executor import Executor, StepHandle
from ..protocol.engine_output import EngineOutput, FinishReason, Timeline
from ..protocol.engine_request import EngineRequest
from ..protocol.interrupts import InterruptAtRequestError
from ..protocol.runner_output import RunnerOutput
from ..protocol.scheduler_output import SchedulerOutput
from ..scheduler.faults import blamed
from ..scheduler.request import Request
from ..scheduler.scheduler import Scheduler
from .latency import Latencies
from .live import Live, finish_of, request_of, seconds_to_first_token
from .suspects import Suspects

logger = get_logger("runtime")
T = TypeVar("T")


class EngineCore:
    """Steps every live request by one token or one chunk of its prompt at a time.

    In come EngineRequests and calls by request id; out come EngineOutputs, appended to `outputs` for the
    client to take from the left. Nothing else is shared with who asks, so he may be in another process.

    `depth` steps are launched before the oldest is read: at 1 the host waits for each step, at 2 it plans
    the next one while a step runs. Calls are not safe to make from several threads at once.

    Whatever interrupts a call, at any line, is followed by the books being opened anew from what the requests
    themselves say, there and then or before the next call. An error ends the request that it is due to. An
    output may then be sent twice, and none is lost.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, *, depth: int = 1) -> None:
        self.scheduler = scheduler
        self.outputs: deque[EngineOutput] = deque()
        self._executor = executor
        self.depth = depth
        self._is_whole = True  # the books: not while something happens to them
        self._at_model: SchedulerOutput | None = None  # the step that is being launched or read
        self._pending: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        self._live: dict[str, Live] = {}
        self._attentive: set[str] = set()  # those that want each token, not all at the end
        self._suspects = Suspects()
        self.latencies = Latencies()
        self.first_token_seconds: float | None = None  # of the first request of all, from its arrival
        self.sleep_level = 0  # above 0 while it sleeps

    @property
    def has_work(self) -> bool:
        """Whether a request is live, or a step in flight."""
        return self.scheduler.has_work or bool(self._pending)

    @property
    def is_asleep(self) -> bool:
        """Whether a step would compute nothing, as the device's memory is given back."""
        return self.sleep_level > 0

    def add(self, request: EngineRequest) -> None:
        """Queues a request; RequestError where one of the same id is live."""
        self._whole(partial(self._add, request))

    def abort(
        self,
        request_id: str,
        reason: FinishReason = "abort",
        stop_reason: int | str | None = None,
        error: LaminaError | None = None,
    ) -> bool:
        """Ends a request wherever it stands and gives its blocks back; False for one that is not live.

        Its last output has the reasons and the error, if any.
        """
        end = request_id, reason, stop_reason, error
        try:
            return self._whole(partial(self._abort, *end))
        except Exception as failure:
            logger.warning("a request was cut off, as it could not be aborted: %s", shown(blamed(failure)[1]))
            return self._whole(partial(self._cut_off, request_id, error))

    def step(self) -> None:
        """Launches a step if there is one; updates from the oldest if enough are launched or none can be.

        An error ends the request that it is due to. Where nothing says whose it is, the step is tried again,
        and then the requests in it one by one. Raises what came from outside, as Ctrl-C. While it sleeps
        requests wait, and those whose deadline passes end.
        """
        try:
            self._whole(self._step)
        except InterruptAtRequestError as interrupt:
            self.abort(interrupt.request_id, error=interrupt.failure)
            raise
        except Exception as error:
            self._whole(partial(self._answer_for, error))

    def count_whole(self, times: Timeline, num_tokens: int) -> None:
        """Counts as one what was served by requests that were parts of it, with so many output tokens."""
        self.scheduler.count_finished()
        self.latencies.add(times, num_tokens)

    def stats(self) -> dict[str, Any]:
        """Returns counts of requests and of tokens in the prefix cache, and latencies, as plain data."""
        scheduler = self.scheduler
        hits = {"queried_tokens": scheduler.num_queried_tokens, "hit_tokens": scheduler.num_hit_tokens}
        return {
            "requests": {
                "waiting": scheduler.num_waiting,
                "running": scheduler.num_running,
                "finished": scheduler.num_finished,
            },
            "preemptions": scheduler.num_preemptions,
            "forced_tokens": scheduler.num_forced_tokens,
            "speculation": scheduler.drafting.stats(),
            "prefix_cache": hits,
            "latency": self.latencies.summary(),
            "first_token": self.first_token_seconds,
        }

    def load_adapter(self, path: str) -> dict[str, Any]:
        """Has every worker read an adapter's folder; returns its digest, rank and modules."""
        return dict(self._executor.collective_rpc("load_adapter", path)[0])

    def unload_adapter(self, digest: str) -> None:
        """Has every worker forget an adapter, once the last live request that has it has ended."""
        self._executor.collective_rpc("unload_adapter", digest)

    def idle(self) -> bool:
        """Captures one more size where no request is live; False where there is nothing to do."""
        return not (self.has_work or self.is_asleep) and self._executor.capture_next()

    def drop_captures(self) -> None:
        """Drops every captured graph; steps run without until idle() captures them again.

        RequestError while requests are live.
        """
        if self.has_work:
            raise RequestError("suspend while requests are live; wait for them or abort them first")
        self._executor.drop_captures()

    def sleep(self, level: int) -> None:
        """Gives the device's memory back; live requests keep their tokens, and wait to be computed again.

        Level 1 keeps the weights on the host, 2 drops them. RequestError for another level. A core that
        sleeps can sleep more deeply, never less.
        """
        if type(level) is not int or level not in (1, 2):
            raise RequestError(f"level is {shown(level)}; wanted 1, to keep the weights on the host, or 2")
        self._wait_for_steps()
        self._whole(partial(self._sleep, level))

    def wake(self, *, capture: bool = True) -> None:
        """Takes the device's memory again; a call that was interrupted or failed can be made again.

        capture: every size that was captured before, too. Raises LoadError where weights that were dropped
        cannot be read.
        """
        if self.is_asleep:
            self._executor.collective_rpc("wake", capture)
            self.sleep_level = 0

    def update_weights(self, kind: str, value: Any) -> None:
        """Has workers replace their weights; live requests keep their tokens, and are computed again.

        kind and value: as workers take them. Raises what they do, and the weights are as they were then.
        Where they could not be kept, or an interrupt came between, it sleeps, until wake() has read them
        again or an update has given them all.
        """
        self._wait_for_steps()
        self._whole(partial(self._update_weights, kind, value))

    def close(self) -> None:
        """Aborts every live request and shuts the executor down; a second call does nothing."""
        for request_id in list(self._live):
            self.abort(request_id)
        self._executor.shutdown()

    def _whole(self, action: Callable[[], T]) -> T:
        """Lets something happen to the books; whatever interrupts it, they are whole before the next."""
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
        """Makes whole what an interrupt or an error left half done, and sends what was not sent."""
        failed, self._at_model = self._at_model, None
        if failed is not None:  # at the device, while the books were whole
            self._undo(failed)
        else:
            self._pending.clear()
            self.scheduler.reopen()
        for request_id in self.scheduler.live_ids - self._live.keys():
            self._executor.remove_request(request_id)
            self.scheduler.abort(request_id)
        for request in [live.request for live in self._live.values()]:
            if request.finish_reason is not None or request.request_id in self._attentive:
                self._send(request)
        self._is_whole = True

    def _answer_for(self, error: Exception) -> None:
        """Ends the request that an error is due to, once it is known."""
        culprit, cause = blamed(error)
        if isinstance(cause, EngineDeadError):
            self._end_all(cause)
            return
        if culprit is None:
            culprit = self._suspects.accuse(self.scheduler.to_suspect())
            self._compute_alone(self._suspects.alone)
        if culprit is None:
            logger.warning("a step failed at no request in particular, and is tried again: %s", shown(cause))
            return
        failure = EngineError(f"a step failed at this request, which ends alone: {shown(cause)}")
        failure.__cause__ = cause
        self._cut_off(culprit.request_id, failure)

    def _end_all(self, error: EngineDeadError) -> None:
        """Ends every request with an error: there is nothing left to compute any of them."""
        self._pending.clear()
        self.scheduler.reopen()
        for live in [*self._live.values()]:
            self.scheduler.abort(live.request.request_id)
            self._send(live.request, error)

    def _cut_off(self, request_id: str, error: LaminaError | None) -> bool:
        """Ends a request whatever state it is in; everybody else is computed again."""
        live = self._live.get(request_id)
        if live is None:
            return False
        self._pending.clear()
        self.scheduler.reopen(without=live.request)
        self._send(live.request, error)
        return True

    def _compute_alone(self, request: Request | None) -> None:
        """Lets one request alone be computed from now on, or everybody."""
        if self.scheduler.alone is not request:
            self._pending.clear()
            self.scheduler.alone = request
            self.scheduler.reopen()

    def _add(self, asked: EngineRequest) -> None:
        request, request_id = request_of(asked), asked.request_id
        self.scheduler.add(request)
        if any(brought := (asked.params.logits_processors or (), asked.grammar, asked.adapter)):
            self._executor.add_request(request_id, *brought)
        if asked.wants_each_token:
            self._attentive.add(request_id)
        self._live[request_id] = Live(request)

    def _abort(
        self,
        request_id: str,
        reason: FinishReason,
        stop_reason: int | str | None,
        error: LaminaError | None,
    ) -> bool:
        live = self._live.get(request_id)
        if live is None:
            return False
        self.scheduler.finish(request_id, reason, stop_reason)
        self._send(live.request, error)
        if self._pending and not self.scheduler.has_work:
            self._finish_pending()
        return True

    def _sleep(self, level: int) -> None:
        self.scheduler.reopen()  # nothing of the cache counts any more, not even who is cached
        was, self.sleep_level = self.sleep_level, max(level, self.sleep_level)  # whatever comes between
        try:
            self._executor.collective_rpc("sleep", level)
        except Exception:
            if not was:
                self._executor.collective_rpc("wake", True)
            self.sleep_level = was
            raise

    def _update_weights(self, kind: str, value: Any) -> None:
        was, self.sleep_level = self.sleep_level, max(1, self.sleep_level)  # whatever comes between
        try:
            self._executor.collective_rpc("update_weights", kind, value)
            self.sleep_level = was
        except Exception:
            if all(self._executor.collective_rpc("has_weights")):
                self.sleep_level = was
            raise
        finally:
            self.scheduler.reopen()  # what the cache holds was computed by other weights

    def _wait_for_steps(self) -> None:
        """Takes in every step in flight, and answers for those that fail."""
        while self._pending:
            try:
                self._whole(self._finish_pending)
            except Exception as error:
                self._whole(partial(self._answer_for, error))

    def _step(self) -> None:
        if self._suspects and self._suspects.clear_innocent():
            self._compute_alone(self._suspects.alone)
        for request in self.scheduler.expire():
            self._send(request)
        if self.is_asleep:
            return
        needs_tokens = self.scheduler.needs_tokens
        if needs_tokens and self._pending:  # the client may end some by their text before the next is planned
            self._finish_pending()
            return
        plan = self.scheduler.schedule()
        if plan is not None:
            self._launch(plan)
        depth = 1 if self._suspects or needs_tokens else self.depth
        if self._pending and (plan is None or len(self._pending) >= depth):
            self._take_in_oldest()
        if not self.scheduler.has_work:
            self._finish_pending()

    def _launch(self, plan: SchedulerOutput) -> None:
        self._at_model = plan
        handle = self._executor.execute(plan)
        if handle.error is not None:
            try:
                raise handle.error
            finally:
                del handle  # an error and the frame that it came through would hold each other, and the step
        self._pending.append((plan, handle))
        self._at_model = None

    def _finish_pending(self) -> None:
        """Waits for every step in flight: for its tokens, or so that every block is free."""
        while self._pending:
            self._take_in_oldest()

    def _take_in_oldest(self) -> None:
        plan, handle = self._pending[0]
        self._at_model = plan
        output = handle.result()
        if output.error is not None:
            try:
                raise output.error
            finally:
                del output  # likewise
        self._at_model = None
        self._pending.popleft()
        for request_id, error in output.failures.items():
            if self.scheduler.abort(request_id):
                self._send(self._live[request_id].request, error)
        self._take_in(plan, output)

    def _undo(self, failed: SchedulerOutput) -> None:
        while self._pending and self._pending[-1][0].step >= failed.step:
            self._pending.pop()
        self.scheduler.discard(failed)

    def _take_in(self, plan: SchedulerOutput, output: RunnerOutput) -> None:
        received = self.scheduler.update(plan, output)
        if self.first_token_seconds is None and received:
            self.first_token_seconds = seconds_to_first_token(received[0])
        attentive = self._attentive
        noted = [each for each in received if each.finish_reason or each.request_id in attentive]
        for request in noted:
            self._send(request)

    def _send(self, request: Request, error: LaminaError | None = None) -> None:
        """Appends an output with a request's newest tokens, and with its end and error where it has ended."""
        live = self._live[request.request_id]
        num_sent, is_over = live.num_sent, request.finish_reason is not None
        self.outputs.append(
            EngineOutput(
                request_id=request.request_id,
                num_before=num_sent,
                new_token_ids=tuple(request.output_token_ids[num_sent:]) if request.pooling is None else (),
                logprobs=tuple(request.logprobs[num_sent:]) if request.logprobs else (),
                prompt_logprobs=() if num_sent else tuple(request.prompt_logprobs),
                finish=finish_of(request, error) if is_over else None,
                pooled=request.pooled if is_over else None,
            )
        )
        live.num_sent = len(request.output_token_ids)
        if is_over:
            self._forget(request.request_id)
            if request.finish_reason != "abort" and request.is_counted:
                self.latencies.add(request.times, live.num_sent if request.pooling is None else 0)

    def _forget(self, request_id: str) -> None:
        self._executor.remove_request(request_id)
        self._attentive.discard(request_id)
        self._live.pop(request_id, None)
