"""Outputs of the core as callers read them: text, stop strings and log-probabilities, by request id."""

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from ...common.errors import EngineError, LaminaError, shown
from ..protocol.engine_output import EngineOutput, Finish, FinishReason
from ..protocol.engine_request import EngineRequest
from ..protocol.scheduler_output import TokenLogprobs
from ..tokenization.detokenizer import IncrementalDetokenizer
from .logprobs import LogprobsFormatter, cumulative
from .outputs import CompletionOutput, RequestTimes, StreamDelta


class Published(NamedTuple):
    """How much of an answer may be read, by any thread and without a lock."""

    num_tokens: int = 0
    is_over: bool = False  # there will be no more


class Stop(NamedTuple):
    """A request that is to be ended in the core, as nothing more is wanted of it."""

    request_id: str
    stop_string: str | None  # that its text came to; None: its text cannot be made


NOTHING_PUBLISHED = Published()


@dataclass(kw_only=True, slots=True, eq=False)
class Answer:
    """One answer being written. The output processor alone writes it; whoever asked reads what is published.

    It depends on nothing but the outputs that were delivered, once or more often: each list is caught up from
    its own length, and `published` is written last, in one assignment. So an interrupt at any line, followed
    by the same outputs again, changes nothing, and another thread that reads finds the answer as it was
    before an output or after it.
    """

    request_id: str
    asked_id: str  # what the caller knows it by
    index: int = 0  # of the answers to what a caller asked, of which there may be several
    new_detokenizer: Callable[[], IncrementalDetokenizer] | None = None  # None: there is no text
    stop_token_ids: frozenset[int] = frozenset()  # the caller's own, which may be part of the text
    formatter: LogprobsFormatter = field(default_factory=LogprobsFormatter)
    wants_cumulative: bool = False  # the log-probability of all tokens together
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the tokens, where wanted
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: bytes | None = None  # what was wanted in place of tokens, once it is over
    finish: Finish | None = None  # how the core ended it
    stop_string: str | None = None  # that its text came to, whatever else ended it
    error: LaminaError | None = None  # what ended it, for whoever asked
    published: Published = NOTHING_PUBLISHED
    _pieces: list[str] = field(default_factory=list)  # the text that each token made certain
    _rest: str = ""  # what the end made certain
    _detokenizer: IncrementalDetokenizer | None = None  # has read the pieces; None: nobody has, or not whole

    @property
    def text(self) -> str:
        """The text that is certain so far."""
        return "".join(self._pieces) + self._rest

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended, None while it has not: a stop string wins over whatever ended it in the core."""
        if self.stop_string is not None:
            return "stop"
        return None if self.finish is None else self.finish.reason

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or token id that ended it, "deadline", or None."""
        if self.stop_string is not None:
            return self.stop_string
        return None if self.finish is None else self.finish.stop_reason

    def prepare(self) -> None:
        """Reads the end of the prompt, behind which the text is to stand: while the core computes.

        What that raises is raised again by take_in().
        """
        if self.new_detokenizer is not None and self._detokenizer is None:
            with suppress(Exception):
                self._detokenizer = self.new_detokenizer()

    def take_in(self, output: EngineOutput) -> None:
        """Catches up with an output, new or delivered before; drops what follows a stop string or the end.

        Raises whatever the tokenizer raises; the same output may be taken in again.
        """
        finish = output.finish
        if self.published.is_over:
            return
        if self.stop_string is None and finish is not None and finish.error is not None:
            self.fail(finish.error)
            return
        if self.stop_string is None:
            self._catch_up(output)
        if finish is not None:
            self.finish = finish
            self.published = Published(len(self.token_ids), is_over=True)
        elif self.stop_string is None:  # a stop is published with the end, which the core is to confirm
            self.published = Published(len(self.token_ids))

    def fail(self, error: LaminaError) -> None:
        """Ends it by an error; of its text callers keep what was published."""
        self.error = error
        self.published = Published(self.published.num_tokens, is_over=True)

    def completion(self, index: int) -> CompletionOutput:
        """Returns the whole of it, once it is over, as the answer of that index."""
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.formatter.of_answer(self.logprobs),
            pooled=self.pooled,
            cumulative_logprob=cumulative(self.logprobs) if self.wants_cumulative else None,
            times=self.times,
        )

    @property
    def times(self) -> RequestTimes:
        """When it was queued, got its first token and ended, once it is over."""
        assert self.finish is not None, "an answer that has not ended"
        times = self.finish.times
        assert times.queued is not None
        return RequestTimes(queued=times.queued, first_token=times.first_token, finished=times.finished)

    def _catch_up(self, output: EngineOutput) -> None:
        _, num_before, new_token_ids, logprobs, prompt_logprobs, finish, pooled = output
        token_ids = self.token_ids
        assert num_before <= len(token_ids), "an output was lost"
        if pooled is not None:
            self.pooled = pooled
        if prompt_logprobs:
            self.prompt_logprobs = prompt_logprobs
        token_ids += new_token_ids[len(token_ids) - num_before :]
        if logprobs:
            self.logprobs += logprobs[len(self.logprobs) - num_before :]
        if self.new_detokenizer is not None:
            self._write(self.new_detokenizer, finish)

    def _write(self, new_detokenizer: Callable[[], IncrementalDetokenizer], finish: Finish | None) -> None:
        """Turns new tokens into text, up to the one that completes a stop string."""
        detokenizer, self._detokenizer = self._detokenizer, None
        if detokenizer is None:
            detokenizer = self._replayed(new_detokenizer)
        token_ids, pieces = self.token_ids, self._pieces
        num_before_last = len(token_ids) - (finish is not None)
        while len(pieces) < num_before_last:
            pieces.append(detokenizer.append_token(token_ids[len(pieces)]))
            if detokenizer.stop_reason is not None:
                del token_ids[len(pieces) :], self.logprobs[len(pieces) :]
                break
        if finish is not None:
            if len(pieces) < len(token_ids):
                pieces.append(self._text_of(finish, detokenizer, token_ids[-1]))
            self._rest = detokenizer.finish()
        self._detokenizer = detokenizer
        self.stop_string = detokenizer.stop_reason

    def _replayed(self, new_detokenizer: Callable[[], IncrementalDetokenizer]) -> IncrementalDetokenizer:
        """Returns a detokenizer that has read what is published, for one that an interrupt left half way."""
        detokenizer, num_tokens = new_detokenizer(), self.published.num_tokens
        for token_id in self.token_ids[:num_tokens]:
            detokenizer.append_token(token_id)
        del self._pieces[num_tokens:]
        return detokenizer

    def _text_of(self, end: Finish, detokenizer: IncrementalDetokenizer, token_id: int) -> str:
        """Returns the text that the last token makes certain: an EOS has none, a stop token only if asked."""
        if end.reason != "stop" or isinstance(end.stop_reason, str):
            return detokenizer.append_token(token_id)
        if token_id in self.stop_token_ids:
            return detokenizer.append_stop_token(token_id)
        return ""


class Submission(NamedTuple):
    """A request for the core, with the answer that its outputs become."""

    request: EngineRequest
    answer: Answer


class OutputProcessor:
    """Turns outputs of the core into answers. It knows no lock and no core: its client has both."""

    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}

    def add(self, answer: Answer) -> None:
        """Expects outputs for an answer; to be called before its request is added to the core."""
        self._answers[answer.request_id] = answer

    def forget(self, request_id: str) -> None:
        """Expects no more for a request; outputs that come nevertheless are dropped."""
        self._answers.pop(request_id, None)

    def process(self, outputs: Iterable[EngineOutput]) -> list[Stop]:
        """Takes in outputs; returns the requests to be ended in the core, until it says that they have ended.

        What fails at one answer, as its tokenizer does, ends that one. After an interrupt at any line the
        same outputs are to be processed again.
        """
        stops: dict[str, Stop] = {}
        for output in outputs:
            request_id = output.request_id
            answer = self._answers.get(request_id)
            if answer is None:
                continue
            try:
                answer.take_in(output)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a tokenizer may panic as Rust does, which is no Exception
                answer.fail(_text_failure(error))
            if output.finish is not None:
                stops.pop(request_id, None)
                self.forget(request_id)
            elif answer.stop_string is not None or answer.error is not None:
                stops[request_id] = Stop(request_id, answer.stop_string)
        return [*stops.values()]


def _text_failure(cause: BaseException) -> EngineError:
    failure = EngineError(f"the text of this answer could not be made: {shown(cause)}")
    failure.__cause__ = cause
    return failure


class Reader:
    """What one caller has read of an answer that is streamed."""

    __slots__ = ("_answer", "_is_first", "_num_tokens", "is_done")

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._num_tokens = 0
        self._is_first = True  # what is read next
        self.is_done = False

    @property
    def error(self) -> LaminaError | None:
        """What ended the answer, once all that was written before has been read."""
        return self._answer.error if self.is_done else None

    def next(self) -> StreamDelta | None:
        """Returns the next piece, None while there is none, or no more; an error is no piece."""
        return self.read(1)

    def read_text(self, most: int) -> tuple[str, int] | None:
        """Returns new text, and of how many tokens it is, where read() would return nothing but that.

        None: there is nothing new, more than `most` tokens are, or they are the first or the last.
        """
        answer, start = self._answer, self._num_tokens
        end, is_over = answer.published
        if is_over or self._is_first or not 0 < end - start <= most:
            return None
        self._num_tokens = end
        return "".join(answer._pieces[start:end]), end - start

    def read(self, most: int = sys.maxsize) -> StreamDelta | None:
        """Returns all new pieces as one, of at most so many tokens; None where next() has none."""
        if self.is_done:
            return None
        answer, start = self._answer, self._num_tokens
        end, is_over = answer.published
        if end - start > most:
            end, is_over = start + most, False
        self._num_tokens, self.is_done = end, is_over
        has_end = is_over and answer.error is None
        if start == end and not has_end:
            return None
        text = "".join(answer._pieces[start:end])
        delta = StreamDelta(
            request_id=answer.asked_id,
            index=answer.index,
            text=text + answer._rest if has_end else text,
            token_ids=tuple(answer.token_ids[start:end]),
        )
        if has_end:
            delta.finish_reason, delta.stop_reason = answer.finish_reason, answer.stop_reason
        if answer.formatter.num_top is not None:
            delta.logprobs = answer.formatter.of_answer(answer.logprobs[start:end])
        if self._is_first:
            self._is_first = False
            delta.prompt_logprobs = answer.formatter.of_prompt(answer.prompt_logprobs)
        return delta
