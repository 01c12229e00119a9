"""One answer being written: the tokens of its request as text, and how much of it callers may read."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ...common.errors import LaminaError
from ..scheduler.request import Request
from ..tokenization.detokenizer import IncrementalDetokenizer
from .logprobs import Teller, cumulative
from .outputs import CompletionOutput, RequestTimes, StreamDelta


class Told(NamedTuple):
    """How much of an answer may be read, by any thread and without a lock."""

    num_tokens: int = 0
    is_over: bool = False  # there will be no more


class TextFaultError(Exception):
    """The text of an answer cannot be made; the cause is a tokenizer's, which may panic as Rust does."""


NOTHING_TOLD = Told()


@dataclass(slots=True)
class Generation:
    """A request with its text. Whoever steps the engine writes it, whoever asked reads what is told.

    Everything in it only grows, and `told` is written last, in one assignment: an interrupt, or another
    thread that reads, finds the answer as it was before a token or after it.
    """

    request: Request
    asked_id: str  # what the caller knows it by
    index: int = 0  # of the answers to what a caller asked, of which there may be several
    new_detokenizer: Callable[[], IncrementalDetokenizer] | None = None  # None: there is no text
    teller: Teller = field(default_factory=Teller)
    is_streamed: bool = False
    error: LaminaError | None = None  # what ended it, for whoever asked
    told: Told = NOTHING_TOLD
    _pieces: list[str] = field(default_factory=list)  # the text that each token made certain
    _rest: str = ""  # what the end made certain
    _detokenizer: IncrementalDetokenizer | None = None  # has read the pieces; None: nobody has, or not whole

    @property
    def wants_each_token(self) -> bool:
        return self.new_detokenizer is not None or self.is_streamed

    @property
    def text(self) -> str:
        """The text that is certain so far."""
        return "".join(self._pieces) + self._rest

    def __post_init__(self) -> None:
        if self.new_detokenizer is not None:
            self._detokenizer = self.new_detokenizer()

    def read(self) -> str | None:
        """Turn new tokens into text; returns the stop string that they complete, if any."""
        if self.new_detokenizer is None:
            return None
        detokenizer, self._detokenizer = self._detokenizer, None
        try:
            detokenizer = detokenizer or self._replayed(self.new_detokenizer)
            for place in range(len(self._pieces), len(self.request.output_token_ids)):
                self._pieces.append(self._text_of(place, detokenizer))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise TextFaultError from error
        self._detokenizer = detokenizer
        return detokenizer.stop_reason

    def tell(self) -> None:
        """Let callers read what there is, the rest of the text included where the request has ended."""
        is_over = self.request.finish_reason is not None
        if is_over and self._detokenizer is not None:
            detokenizer, self._detokenizer = self._detokenizer, None
            try:
                self._rest = detokenizer.finish()
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                raise TextFaultError from error
        self.told = Told(len(self.request.output_token_ids), is_over)

    def tell_failure(self, error: LaminaError) -> None:
        """Let callers know what ended it; of its text they keep what was told."""
        self.error = error
        self.told = Told(self.told.num_tokens, is_over=True)

    def answer(self, index: int) -> CompletionOutput:
        """The whole of it, once it is over, as the answer of that index."""
        request, reports = self.request, self.request.logprobs
        queued = request.times.queued
        assert queued is not None
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=tuple(request.output_token_ids),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            logprobs=self.teller.of_answer(reports),
            cumulative_logprob=None if request.params.logprobs is None else cumulative(reports),
            times=RequestTimes(
                queued=queued, first_token=request.times.first_token, finished=request.times.finished
            ),
        )

    def _replayed(self, new_detokenizer: Callable[[], IncrementalDetokenizer]) -> IncrementalDetokenizer:
        """A detokenizer that has read what was told, for one that an interrupt may have left half way."""
        detokenizer, num_told = new_detokenizer(), self.told.num_tokens
        for place in range(num_told):
            detokenizer.append(self.request.output_token_ids[place : place + 1])
        del self._pieces[num_told:]
        return detokenizer

    def _text_of(self, place: int, detokenizer: IncrementalDetokenizer) -> str:
        """The text that a token makes certain: an EOS has none, a stop token only if asked for."""
        request, token_ids = self.request, self.request.output_token_ids
        token_id, is_last = token_ids[place], place == len(token_ids) - 1
        if not is_last or request.finish_reason != "stop" or isinstance(request.stop_reason, str):
            return detokenizer.append((token_id,))
        if token_id in (request.params.stop_token_ids or ()):
            return detokenizer.append_stop_token(token_id)
        return ""


class Reader:
    """What one caller has read of an answer that is streamed."""

    def __init__(self, generation: Generation) -> None:
        generation.is_streamed = True
        self._generation = generation
        self._num_tokens = 0
        self._num_deltas = 0
        self.is_done = False

    @property
    def error(self) -> LaminaError | None:
        """What ended the answer, once all that was written before has been read."""
        return self._generation.error if self.is_done else None

    def next(self) -> StreamDelta | None:
        """The next piece, None while there is none, or no more; an error is no piece."""
        told, error = self._generation.told, self._generation.error
        is_token = self._num_tokens < told.num_tokens
        if self.is_done or not (is_token or told.is_over):
            return None
        self.is_done = told.is_over and self._num_tokens + is_token == told.num_tokens and error is None
        if not is_token and error is not None:
            self.is_done = True
            return None
        delta = self._delta(is_token)
        self._num_tokens += is_token
        self._num_deltas += 1
        return delta

    def _delta(self, is_token: bool) -> StreamDelta:
        generation, request = self._generation, self._generation.request
        which = slice(self._num_tokens, self._num_tokens + is_token)
        text = "".join(generation._pieces[which]) + (generation._rest if self.is_done else "")
        is_first = self._num_deltas == 0
        return StreamDelta(
            request_id=generation.asked_id,
            index=generation.index,
            text=text,
            token_ids=tuple(request.output_token_ids[which]),
            finish_reason=request.finish_reason if self.is_done else None,
            logprobs=generation.teller.of_answer(request.logprobs[which]),
            prompt_logprobs=generation.teller.of_prompt(request.prompt_logprobs) if is_first else None,
        )
