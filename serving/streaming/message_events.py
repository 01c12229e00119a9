"""Messages as Anthropic's clients read them: whole, or as named server-sent events."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...runtime.engine.outputs import CompletionOutput, StreamDelta
from ..errors import ANTHROPIC_PATH, ApiError
from ..protocol.usage import Usage
from ..tools.parts import Part
from ..tools.reader import AnswerReader
from .message_blocks import MessageBlocks, event

ERROR = b"event: error\ndata: "


@dataclass(frozen=True, kw_only=True, slots=True)
class Writing:
    """A message that is being written."""

    id: str
    model: str  # by the name that the client used
    max_tokens: int
    new_reader: Callable[[], AnswerReader]

    def whole(self, answer: CompletionOutput, usage: Usage) -> dict[str, Any]:
        """Returns the message as plain data."""
        reader = self.new_reader()
        blocks = MessageBlocks(reader.new_id)
        for part in reader.whole(answer.text):
            blocks.add(part)
        blocks.close()
        last = self.ending(answer, len(answer.token_ids), reader.has_calls)
        return self.message(blocks.content, last, usage)

    def message(
        self, content: list[dict[str, Any]], ending: dict[str, str | None], usage: Usage
    ) -> dict[str, Any]:
        """Returns it as far as it is written, as plain data."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **ending,
            "usage": usage_of(usage),
        }

    def ending(
        self, last: CompletionOutput | StreamDelta, num_tokens: int, has_calls: bool
    ) -> dict[str, str | None]:
        """Returns why the message ended after so many tokens."""
        if last.finish_reason == "length":
            is_full = num_tokens < self.max_tokens
            return ending("model_context_window_exceeded" if is_full else "max_tokens")
        if last.finish_reason == "stop" and isinstance(last.stop_reason, str):
            return ending("stop_sequence", last.stop_reason)
        return ending("tool_use" if has_calls and last.finish_reason == "stop" else "end_turn")


class MessageEvents:
    """The events of a message: its start, its blocks piece by piece, why it ended and what it took."""

    write_text: Callable[[str, int], bytes] | None = (
        None  # what stands around a text depends on what came before
    )

    def __init__(self, writing: Writing, usage: Callable[[int], Usage]) -> None:
        """usage: what it says when so many tokens have been sent."""
        self._writing, self._usage = writing, usage
        self._reader = writing.new_reader()
        self._is_plain = self._reader.tools is None and self._reader.reasoning is None
        self._blocks = MessageBlocks(self._reader.new_id)
        self._num_tokens = 0
        self._last: StreamDelta | None = None

    def write(self, deltas: Sequence[StreamDelta]) -> bytes:
        """Returns the events of what is new, preceded by those that begin the message."""
        events = [] if self._last else [self._start()]
        for delta in deltas:
            self._last = delta
            self._num_tokens += len(delta.token_ids)
            if not delta.text:
                continue
            parts = [Part("content", delta.text)] if self._is_plain else self._reader.feed(delta.text)
            events += map(self._blocks.add, parts)
        return "".join(events).encode()

    def end(self) -> bytes:
        """Returns the events that end the message."""
        assert self._last is not None, "a message has at least one delta"
        events = [*map(self._blocks.add, self._reader.finish()), self._blocks.close()]
        delta = self._writing.ending(self._last, self._num_tokens, self._reader.has_calls)
        usage = usage_of(self._usage(self._num_tokens))
        events += [event("message_delta", delta=delta, usage=usage), event("message_stop")]
        return "".join(events).encode()

    def fail(self, error: ApiError) -> bytes:
        """Returns an error in place of what would follow."""
        return ERROR + error.body(ANTHROPIC_PATH) + b"\n\n"

    def _start(self) -> str:
        message = self._writing.message([], ending(None), self._usage(0))
        begun = self._blocks.begin("content") if self._is_plain else ""
        return event("message_start", message=message) + begun + event("ping")


def ending(reason: str | None, sequence: str | None = None) -> dict[str, str | None]:
    """Returns why a message ended, None while it is written, and the stop sequence that ended it."""
    return {"stop_reason": reason, "stop_sequence": sequence}


def usage_of(usage: Usage) -> dict[str, int]:
    """Returns what was read and written; tokens that were in the prefix cache are counted apart."""
    num_cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage.completion_tokens,
    }
