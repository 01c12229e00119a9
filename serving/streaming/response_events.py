"""Responses as OpenAI's clients read them: whole, or as typed server-sent events."""

import json
import time
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii as quoted  # U+2028 too, at which some clients end a line
from typing import Any

import msgspec

from ...runtime.engine.outputs import CompletionOutput, StreamDelta
from ..errors import ApiError
from ..protocol.response_answers import (
    FailedBy,
    IncompleteDetails,
    OutputMessage,
    OutputText,
    ResponseAnswer,
    ResponseUsage,
    Status,
)
from ..protocol.usage import Usage

STATUS: dict[str | None, Status] = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}
LAST_EVENT: dict[Status, str] = {"completed": "response.completed", "failed": "response.failed"}


class Writing:
    """A response that is being written."""

    def __init__(self, response: ResponseAnswer, on_end: Callable[[ResponseAnswer, str], None]) -> None:
        """response: as it begins. on_end: told of it once it has ended, with its text."""
        self.begun = response
        self.item_id = f"msg_{response.id.removeprefix('resp_')}"
        self._on_end = on_end
        self._is_over = False

    def ended(self, last: CompletionOutput | StreamDelta, text: str, usage: Usage) -> ResponseAnswer:
        """Returns the response that ended by that, with all its text."""
        return self.end(STATUS[last.finish_reason], text, usage)

    def end(
        self, status: Status, text: str | None, usage: Usage | None, error: FailedBy | None = None
    ) -> ResponseAnswer:
        """Returns the response as it has ended, with its text where there is any."""
        found = msgspec.structs.replace(
            self.begun,
            status=status,
            output=[] if text is None else [self.item(status, text)],
            usage=None if usage is None else ResponseUsage.of(usage),
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=(
                IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None
            ),
            error=error,
        )
        if not self._is_over:
            self._is_over = True
            self._on_end(found, text or "")
        return found

    def item(self, status: Status, *texts: str) -> OutputMessage:
        """Returns the message of the response."""
        known = status if status in ("in_progress", "completed") else "incomplete"
        return OutputMessage(id=self.item_id, status=known, content=[OutputText(text=text) for text in texts])


class ResponseEvents:
    """The events of a response: its beginning, its text piece by piece, and its end."""

    def __init__(self, writing: Writing, usage: Callable[[int], Usage]) -> None:
        """usage: what it says when so many tokens have been told."""
        self._writing, self._usage = writing, usage
        self._num_events = self._num_tokens = 0
        self._texts: list[str] = []
        self._last: StreamDelta | None = None
        place = f'"item_id":"{writing.item_id}","output_index":0,"content_index":0'
        name = "response.output_text.delta"
        self._open = f'event: {name}\ndata: {{"type":"{name}",{place},"logprobs":[],"sequence_number":'

    @property
    def is_begun(self) -> bool:
        """Whether its client has been told of it."""
        return self._last is not None

    def write(self, deltas: Sequence[StreamDelta]) -> bytes:
        """Returns the events of what is new, preceded by those that begin the response."""
        events = [] if self._last else self._start()
        for delta in deltas:
            self._last = delta
            self._num_tokens += len(delta.token_ids)
            if delta.text:
                self._texts.append(delta.text)
                events.append(f'{self._open}{self._num_events},"delta":{quoted(delta.text)}}}\n\n')
                self._num_events += 1
        return "".join(events).encode()

    def end(self) -> bytes:
        """Returns the events that end the response."""
        assert self._last is not None, "a response has at least one delta"
        text = "".join(self._texts)
        response = self._writing.ended(self._last, text, self._usage(self._num_tokens))
        place, (item,) = self._place(), response.output
        events = [
            self._event("response.output_text.done", **place, text=text, logprobs=[]),
            self._event("response.content_part.done", **place, part=item.content[0]),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(LAST_EVENT.get(response.status, "response.incomplete"), response=response),
        ]
        return "".join(events).encode()

    def fail(self, error: ApiError) -> bytes:
        """Returns the event of a response that failed, with what had been written."""
        why = FailedBy(code=error.code or "server_error", message=error.message)
        usage = self._usage(self._num_tokens)
        response = self._writing.end("failed", "".join(self._texts), usage, why)
        return self._event("response.failed", response=response).encode()

    def leave(self) -> None:
        """Notes that nobody reads the response, which is cancelled unless it has ended."""
        self._writing.end("cancelled", "".join(self._texts), self._usage(self._num_tokens))

    def _start(self) -> list[str]:
        begun, item, part = self._writing.begun, self._writing.item("in_progress"), OutputText(text="")
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place(), part=part),
        ]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._writing.item_id, "output_index": 0, "content_index": 0}

    def _event(self, name: str, **fields: Any) -> str:
        data = {"type": name, "sequence_number": self._num_events, **msgspec.to_builtins(fields)}
        self._num_events += 1
        return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"
