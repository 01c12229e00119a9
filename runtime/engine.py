"""The loop: schedule, execute, update, and the text of what came out."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..common.errors import LaminaError
from .detokenizer import IncrementalDetokenizer
from .latency import Latencies
from .logprobs import Teller, cumulative
from .model_runner import ModelRunner, StepHandle
from .outputs import CompletionOutput, StreamDelta
from .request import Request
from .scheduler import Scheduler
from .scheduler_output import Reports, SchedulerOutput


@dataclass(slots=True)
class Generation:
    """A request with its text; whoever steps the engine fills `deltas`, whoever asked empties it.

    It writes one answer to what a caller asked, of which there may be several.
    """

    request: Request
    detokenizer: IncrementalDetokenizer | None
    asked_id: str  # what the caller knows it by
    index: int = 0  # of the answer
    teller: Teller = field(default_factory=Teller)
    deltas: deque[StreamDelta] | None = None  # None where nobody wants the answer in pieces
    error: LaminaError | None = None  # what ended it, for whoever asked
    has_told_prompt: bool = False  # its log-probabilities

    @property
    def is_finished(self) -> bool:
        return self.request.finish_reason is not None

    @property
    def wants_each_token(self) -> bool:
        return self.detokenizer is not None or self.deltas is not None

    @property
    def has_told_its_end(self) -> bool:
        """Whether the last piece of the answer is out."""
        return self.deltas is not None and any(
            delta.finish_reason for delta in self.deltas if delta.index == self.index
        )

    def answer(self, index: int) -> CompletionOutput:
        """The whole of it, once it is finished, as the answer of that index."""
        request = self.request
        reports = request.logprobs[: len(request.output_token_ids)]  # an interrupt may come between the two
        return CompletionOutput(
            index=index,
            text=self.detokenizer.text if self.detokenizer else "",
            token_ids=tuple(request.output_token_ids),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            logprobs=self.teller.of_answer(reports),
            cumulative_logprob=None if request.params.logprobs is None else cumulative(reports),
        )


class Engine:
    """Steps every live request by one token or one chunk of its prompt at a time.

    `depth` steps are launched before the oldest is read: at 1 the host waits for each step, at 2 it plans
    the next one and writes the text of the last one while a step runs.
    """

    def __init__(self, scheduler: Scheduler, model_runner: ModelRunner, *, depth: int = 1) -> None:
        self.scheduler = scheduler
        self._model_runner = model_runner
        self._depth = depth
        self._at_model: SchedulerOutput | None = None  # the step that is being launched or read
        self._pending: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        self._generations: dict[str, Generation] = {}
        self._interrupt: KeyboardInterrupt | None = None  # that came in code of a request's own
        self._attentive: set[str] = set()  # those that want each token, not the answer alone
        self.latencies = Latencies()
        self.first_token_seconds: float | None = None  # of the first request of all, from its arrival

    def add(self, generation: Generation) -> None:
        """Queue a request."""
        self.scheduler.add(generation.request)
        request_id = generation.request.request_id
        self._generations[request_id] = generation
        if generation.wants_each_token:
            self._attentive.add(request_id)

    def abort(self, request_id: str) -> bool:
        """End a request wherever it stands and give its blocks back; False for one that is not live."""
        aborted = self.scheduler.abort(request_id)
        if aborted:
            self._tell_end(request_id)
        if self._pending and not self.scheduler.has_work:
            self._advance(self._finish_pending)
        return aborted

    def fail(self, request_id: str, error: LaminaError) -> bool:
        """End a request alone, with an error for whoever asked; False for one that is not live."""
        generation = self._generations.get(request_id)
        if generation is None or not self.scheduler.abort(request_id):
            return False
        generation.error = error
        self._tell_end(request_id)
        return True

    def step(self) -> None:
        """Launch a step if there is one, then take in the oldest, where enough are launched or none can be.

        A step that fails at the model is undone, and so is what was launched after it: its requests stand
        where they stood. An interrupt that hits the books instead may leave them half written, so it ends
        every request. Either goes to the caller.
        """
        self._advance(self._step)

    def idle(self) -> bool:
        """Record one more size where no request is live; False where there was nothing to do."""
        if self.scheduler.has_work or self._pending:
            return False
        return self._model_runner.record_next()

    def forget_recordings(self) -> None:
        """Drop every recording; steps run without until idle() makes them again."""
        self._finish_pending()
        self._model_runner.forget_recordings()

    def close(self) -> None:
        """Abort every live request."""
        for request_id in list(self._generations):
            self.abort(request_id)

    def _advance(self, action: Callable[[], None]) -> None:
        self._at_model = None
        try:
            action()
        except BaseException:
            if self._at_model is not None:
                self._undo(self._at_model)
            else:
                self._end_all()
            raise
        if self._interrupt is not None:
            interrupt, self._interrupt = self._interrupt, None
            raise interrupt

    def _step(self) -> None:
        for request in self.scheduler.expire():
            self._tell_end(request.request_id)
        if self.scheduler.needs_tokens:
            self._finish_pending()
        plan = self.scheduler.schedule()
        if plan is not None:
            self._at_model = plan
            self._pending.append((plan, self._model_runner.execute(plan)))
            self._at_model = None
        if self._pending and (plan is None or len(self._pending) >= self._depth):
            self._take_in_oldest()
        if not self.scheduler.has_work:
            self._finish_pending()

    def _finish_pending(self) -> None:
        """Wait for every step in flight: for its tokens, or so that every block is free."""
        while self._pending:
            self._take_in_oldest()

    def _take_in_oldest(self) -> None:
        plan, handle = self._pending[0]
        self._at_model = plan
        token_ids, reports, failures = handle.token_ids(), handle.reports(), handle.failures()
        self._at_model = None
        self._pending.popleft()
        for request_id, error in failures.items():
            self.fail(request_id, error)
        self._take_in(plan, token_ids, reports)
        self._interrupt = interrupt_among(failures.values())

    def _undo(self, failed: SchedulerOutput) -> None:
        while self._pending and self._pending[-1][0].step >= failed.step:
            self._pending.pop()
        self.scheduler.discard(failed)

    def _end_all(self) -> None:
        """Abort every request without trusting the books."""
        self._pending.clear()
        self.scheduler.end_all()
        for generation in self._generations.values():
            if not generation.has_told_its_end:
                self.scheduler.restate(generation.request, "abort", None)  # its last tokens may have no text
                _emit(generation, "", ())
        self._generations.clear()
        self._attentive.clear()

    def _take_in(self, plan: SchedulerOutput, token_ids: NDArray[np.int32], reports: Reports | None) -> None:
        received = self.scheduler.update(plan, token_ids, reports)
        if self.first_token_seconds is None and received:
            self.first_token_seconds = _seconds_to_first_token(received[0])
        for request in received:
            if request.finish_reason is not None or request.request_id in self._attentive:
                self._extend(self._generations[request.request_id])
                if request.finish_reason is not None:
                    self.latencies.add(request)
                    self._forget(request.request_id)

    def _tell_end(self, request_id: str) -> None:
        """Give out what is left of the text of a request that has ended between two tokens."""
        generation = self._forget(request_id)
        if generation is not None:
            _emit(generation, generation.detokenizer.finish() if generation.detokenizer else "", ())

    def _forget(self, request_id: str) -> Generation | None:
        self._attentive.discard(request_id)
        return self._generations.pop(request_id, None)

    def _extend(self, generation: Generation) -> None:
        """Turn a request's newest token into text, and end it where a stop string is complete."""
        request, detokenizer = generation.request, generation.detokenizer
        token_ids = (request.output_token_ids[-1],)
        text = ""
        if detokenizer is not None:
            text = _text_of_newest(request, detokenizer)
            if detokenizer.stop_reason is not None:
                self._stop_at_string(request, detokenizer.stop_reason)
            if request.finish_reason is not None:
                text += detokenizer.finish()
        _emit(generation, text, token_ids)

    def _stop_at_string(self, request: Request, stop: str) -> None:
        """A stop string wins over a length that the same token reached."""
        if request.finish_reason is None:
            self.scheduler.finish(request.request_id, "stop", stop)
        else:
            self.scheduler.restate(request, "stop", stop)


def interrupt_among(failures: Iterable[LaminaError]) -> KeyboardInterrupt | None:
    """A Ctrl-C that came while a request's own code ran has ended that request; it is the caller's, too."""
    causes = (error.__cause__ for error in failures)
    return next((cause for cause in causes if isinstance(cause, KeyboardInterrupt)), None)


def _seconds_to_first_token(request: Request) -> float | None:
    queued, first_token = request.times.queued, request.times.first_token
    return None if queued is None or first_token is None else first_token - queued


def _text_of_newest(request: Request, detokenizer: IncrementalDetokenizer) -> str:
    """The text that the newest token makes certain: an EOS has none, a stop token only if asked for."""
    token_id = request.output_token_ids[-1]
    if request.finish_reason != "stop":
        return detokenizer.append((token_id,))
    if token_id in (request.params.stop_token_ids or ()):
        return detokenizer.append_stop_token(token_id)
    return ""


def _emit(generation: Generation, text: str, token_ids: Sequence[int]) -> None:
    request, teller = generation.request, generation.teller
    if generation.deltas is None or not (text or token_ids or request.finish_reason):
        return
    told_before, generation.has_told_prompt = generation.has_told_prompt, True
    generation.deltas.append(
        StreamDelta(
            request_id=generation.asked_id,
            index=generation.index,
            text=text,
            token_ids=tuple(token_ids),
            finish_reason=request.finish_reason,
            logprobs=teller.of_answer(request.logprobs[-1:] if token_ids else ()),
            prompt_logprobs=None if told_before else teller.of_prompt(request.prompt_logprobs),
        )
    )
