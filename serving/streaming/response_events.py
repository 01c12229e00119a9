"""Responses as OpenAI's clients read them: whole, or as typed server-sent events."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from ...runtime.engine.outputs import StreamDelta
from ..errors import ApiError
from ..protocol.response_objects import (
    FailedBy,
    IncompleteDetails,
    ResponseObject,
    ResponseUsage,
    Status,
)
from ..protocol.usage import Usage
from ..tools.reader import AnswerReader
from .response_items import EventLog, Items

if TYPE_CHECKING:
    from ..tools.parts import Part

STATUS: dict[str | None, Status] = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}
LAST_EVENT: dict[Status, str] = {"completed": "response.completed", "failed": "response.failed"}


class Writing:
    """A response that is being written."""

    def __init__(
        self, response: ResponseObject, reader: AnswerReader, on_end: Callable[[ResponseObject], None]
    ) -> None:
        """response: as it begins. reader: of its text. on_end: told of it once it has ended."""
        self.begun, self.reader, self.log = response, reader, EventLog()
        self._items = Items(response.id.removeprefix("resp_"), reader.new_id, self.log)
        self._on_end = on_end
        self._is_over = False

    def add(self, parts: "Sequence[Part]") -> None:
        """Takes what is new of the answer."""
        for part in parts:
            self._items.add(part)

    def end(self, status: Status, usage: Usage, error: FailedBy | None = None) -> None:
        """Ends the response, unless it has ended."""
        if self._is_over:
            return
        self._is_over = True
        is_whole = status == "completed"
        response = msgspec.structs.replace(
            self.begun,
            status=status,
            output=self._items.close("completed" if is_whole else "incomplete"),
            usage=ResponseUsage.of(usage),
            completed_at=int(time.time()) if is_whole else None,
            incomplete_details=(
                IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None
            ),
            error=error,
        )
        self.log.add(LAST_EVENT.get(status, "response.incomplete"), response=response)
        self._on_end(response)


class ResponseEvents:
    """The events of a response: its beginning, its items piece by piece, and its end."""

    write_text: Callable[[str, int], bytes] | None = (
        None  # what stands around a text depends on what came before
    )

    def __init__(self, writing: Writing, usage: Callable[[int], Usage]) -> None:
        """usage: what it says when so many tokens have been sent."""
        self._writing, self._usage = writing, usage
        self._num_tokens = 0
        self._last: StreamDelta | None = None

    @property
    def is_begun(self) -> bool:
        """Whether anything of it has been sent."""
        return self._last is not None

    def write(self, deltas: Sequence[StreamDelta]) -> bytes:
        """Returns the events of what is new, preceded by those that begin the response."""
        writing = self._writing
        if self._last is None:
            for name in ("response.created", "response.in_progress"):
                writing.log.add(name, response=writing.begun)
        for delta in deltas:
            self._last = delta
            self._num_tokens += len(delta.token_ids)
            if delta.text:
                writing.add(writing.reader.feed(delta.text))
        return writing.log.take()

    def end(self) -> bytes:
        """Returns the events that end the response."""
        assert self._last is not None, "a response has at least one delta"
        return self._end(STATUS[self._last.finish_reason])

    def fail(self, error: ApiError) -> bytes:
        """Returns the events of a response that failed, with what had been written."""
        return self._end("failed", FailedBy(code=error.code or "server_error", message=error.message))

    def leave(self) -> None:
        """Notes that nobody reads the response, which is cancelled unless it has ended."""
        self._end("cancelled")

    def _end(self, status: Status, error: FailedBy | None = None) -> bytes:
        self._writing.add(self._writing.reader.finish())
        self._writing.end(status, self._usage(self._num_tokens), error)
        return self._writing.log.take()
