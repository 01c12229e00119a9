"""Items of a response, reasoning, messages and calls, and the events that tell of them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quoted  # U+2028 too, at which some clients end a line
from typing import Any

import msgspec

from ..protocol.response_objects import (
    FunctionCall,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from ..tools.parts import Part

PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc"}  # of an item's id
NAMES = {"content": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}


class EventLog:
    """Events as they are written, numbered."""

    def __init__(self) -> None:
        self._events: list[str] = []
        self._num_events = 0

    def add(self, name: str, **fields: Any) -> None:
        """Adds an event of any fields."""
        data = {"type": name, "sequence_number": self._num_events, **msgspec.to_builtins(fields)}
        self._num_events += 1
        self._events.append(f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n")

    def add_delta(self, begin: str, text: str) -> None:
        """Adds an event of a text, whose other fields are written already."""
        self._events.append(f'{begin}"sequence_number":{self._num_events},"delta":{quoted(text)}}}\n\n')
        self._num_events += 1

    def take(self) -> bytes:
        """Returns the events since the last time."""
        data = "".join(self._events).encode()
        self._events.clear()
        return data


@dataclass(slots=True, kw_only=True)
class _Open:
    """The item that is being written."""

    kind: str
    id: str
    index: int
    name: str = ""  # of the function that is called
    call_id: str = ""
    begin: str = ""  # of the event of a piece of text
    texts: list[str] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        at = {"item_id": self.id, "output_index": self.index}
        return at if self.kind == "call" else {**at, "content_index": 0}

    @property
    def logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self.kind == "content" else {}

    def part(self, text: str) -> OutputText | ReasoningText:
        return OutputText(text=text) if self.kind == "content" else ReasoningText(text=text)

    def item(self, status: ItemStatus, *texts: str) -> OutputItem:
        """Returns the item with these texts of its parts."""
        if self.kind == "call":
            return FunctionCall(
                id=self.id, call_id=self.call_id, name=self.name, arguments="".join(texts), status=status
            )
        if self.kind == "reasoning":
            content = [ReasoningText(text=text) for text in texts]
            return ReasoningItem(id=self.id, status=status, content=content)
        return OutputMessage(id=self.id, status=status, content=[OutputText(text=text) for text in texts])


class Items:
    """The output of a response as it grows."""

    def __init__(self, number: str, new_call_id: Callable[[], str], log: EventLog) -> None:
        """number: of the response, from which ids of items are made. log: is told of everything."""
        self.done: list[OutputItem] = []
        self._number, self._new_call_id, self._log = number, new_call_id, log
        self._open: _Open | None = None

    def add(self, part: Part) -> None:
        """Takes the next piece of the answer."""
        if part.kind == "call":
            self._begin("call", name=part.text, call_id=self._new_call_id())
            return
        kind = "call" if part.kind == "arguments" else part.kind
        current = self._open
        if current is None or current.kind != kind:
            current = self._begin(kind)
        if part.text:
            current.texts.append(part.text)
            self._log.add_delta(current.begin, part.text)

    def close(self, status: ItemStatus) -> list[OutputItem]:
        """Returns all items, the last with that status; a message without text where nothing was written."""
        if self._open is None and not self.done:
            self._begin("content")
        self._end(status)
        return self.done

    def _begin(self, kind: str, name: str = "", call_id: str = "") -> _Open:
        self._end("completed")
        index = len(self.done)
        made = _Open(
            kind=kind, id=f"{PREFIXES[kind]}_{self._number}_{index}", index=index, name=name, call_id=call_id
        )
        event = f"response.{NAMES[kind]}.delta"
        fields = json.dumps({"type": event, **made.place, **made.logprobs}, separators=(",", ":"))
        made.begin = f"event: {event}\ndata: {fields[:-1]},"
        self._log.add("response.output_item.added", output_index=index, item=made.item("in_progress"))
        if kind != "call":
            self._log.add("response.content_part.added", **made.place, part=made.part(""))
        self._open = made
        return made

    def _end(self, status: ItemStatus) -> None:
        ended, self._open = self._open, None
        if ended is None:
            return
        text, item = "".join(ended.texts), ended.item(status, "".join(ended.texts))
        field_name = "arguments" if ended.kind == "call" else "text"
        done = {**ended.place, field_name: text, **ended.logprobs}
        self._log.add(f"response.{NAMES[ended.kind]}.done", **done)
        if ended.kind != "call":
            self._log.add("response.content_part.done", **ended.place, part=ended.part(text))
        self._log.add("response.output_item.done", output_index=ended.index, item=item)
        self.done.append(item)
