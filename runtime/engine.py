"""The loop: schedule, execute, update, and the text of what came out."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .detokenizer import IncrementalDetokenizer
from .model_runner import ModelRunner, StepHandle
from .outputs import CompletionOutput, RequestOutput, RequestTimes, StreamDelta
from .request import Request
from .scheduler import Scheduler, SchedulerOutput

DEPTH = 1  # steps launched before the oldest is read; 2 would hide the host behind the device


@dataclass(slots=True)
class Generation:
    """A request with its text; whoever steps the engine fills `deltas`, whoever asked empties it."""

    request: Request
    prompt: str | None
    detokenizer: IncrementalDetokenizer | None
    deltas: deque[StreamDelta] = field(default_factory=deque)

    @property
    def is_finished(self) -> bool:
        return self.request.finish_reason is not None

    def output(self) -> RequestOutput:
        """The whole answer, once it is finished."""
        request, times = self.request, self.request.times
        assert times.queued is not None
        answer = CompletionOutput(
            index=0,
            text=self.detokenizer.text if self.detokenizer else "",
            token_ids=tuple(request.output_token_ids),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=self.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=(answer,),
            times=RequestTimes(queued=times.queued, first_token=times.first_token, finished=times.finished),
        )


class Engine:
    """Steps every live request by one token or one chunk of its prompt at a time."""

    def __init__(self, scheduler: Scheduler, model_runner: ModelRunner) -> None:
        self.scheduler = scheduler
        self._model_runner = model_runner
        self._pending: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        self._generations: dict[str, Generation] = {}
        self.first_token_seconds: float | None = None  # of the first request of all, from its arrival

    def add(self, generation: Generation) -> None:
        """Queue a request."""
        self.scheduler.add(generation.request)
        self._generations[generation.request.request_id] = generation

    def abort(self, request_id: str) -> bool:
        """End a request wherever it stands and give its blocks back; False for one that is not live."""
        aborted = self.scheduler.abort(request_id)
        generation = self._generations.pop(request_id, None)
        if aborted and generation is not None:
            _emit(generation, generation.detokenizer.finish() if generation.detokenizer else "", ())
        return aborted

    def step(self) -> None:
        """Launch a step if there is one, then take in the oldest that was launched.

        A step that fails at the model is undone: its requests stand where they stood. An interrupt that hits
        the books instead may leave them half written, so it ends every request. Either goes to the caller.
        """
        at_model: SchedulerOutput | None = None
        try:
            plan = self.scheduler.schedule()
            if plan is not None:
                at_model = plan
                self._pending.append((plan, self._model_runner.execute(plan)))
                at_model = None
            if self._pending and (plan is None or len(self._pending) >= DEPTH):
                at_model, handle = self._pending.popleft()
                oldest, token_ids, at_model = at_model, handle.token_ids(), None
                self._take_in(oldest, token_ids)
        except BaseException:
            self._pending.clear()
            if at_model is not None:
                self.scheduler.discard(at_model)
            else:
                self._end_all()
            raise

    def close(self) -> None:
        """Abort every live request."""
        for request_id in list(self._generations):
            self.abort(request_id)

    def _end_all(self) -> None:
        """Abort every request without trusting the books."""
        self.scheduler.end_all()
        for generation in self._generations.values():
            self.scheduler.restate(generation.request, "abort", None)  # its last tokens may have no text
            _emit(generation, "", ())
        self._generations.clear()

    def _take_in(self, plan: SchedulerOutput, token_ids: list[int]) -> None:
        for request in self.scheduler.update(plan, token_ids):
            if self.first_token_seconds is None and request.times.first_token and request.times.queued:
                self.first_token_seconds = request.times.first_token - request.times.queued
            self._extend(self._generations[request.request_id])
            if request.finish_reason is not None:
                del self._generations[request.request_id]

    def _extend(self, generation: Generation) -> None:
        """Turn a request's newest token into text, and end it where a stop string is complete."""
        request, detokenizer = generation.request, generation.detokenizer
        token_ids = (request.output_token_ids[-1],)
        text = ""
        if detokenizer is not None:
            text = detokenizer.append(token_ids) if _is_shown(request) else ""
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


def _is_shown(request: Request) -> bool:
    """Whether the newest token is part of the text: an id that stopped the request is not."""
    return request.finish_reason != "stop"


def _emit(generation: Generation, text: str, token_ids: Sequence[int]) -> None:
    request = generation.request
    if not text and not token_ids and request.finish_reason is None:
        return
    generation.deltas.append(
        StreamDelta(
            request_id=request.request_id,
            index=0,
            text=text,
            token_ids=tuple(token_ids),
            finish_reason=request.finish_reason,
        )
    )
