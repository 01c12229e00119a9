"""Blocks of a message, text, thinking and calls, and the events that tell of them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quoted  # U+2028 too, at which some clients end a line
from typing import Any

from ..tools.partial_json import object_so_far
from ..tools.parts import Part

DELTAS = {  # of each kind: the type of a piece, and its field
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
CLOSE = "}}\n\n"


@dataclass(slots=True, kw_only=True)
class _Block:
    """One block, as far as it is written."""

    kind: str
    begin: str  # of the event of a piece
    fields: dict[str, Any]  # as it begins
    texts: list[str] = field(default_factory=list)

    def whole(self) -> dict[str, Any]:
        text = "".join(self.texts)
        if self.kind == "call":
            return {**self.fields, "input": object_so_far(text)}
        return {**self.fields, DELTAS[self.kind][1]: text}


class MessageBlocks:
    """The content of a message as it grows; every method returns the events of what it did."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        """new_id: makes the id of a call."""
        self._new_id = new_id
        self._blocks: list[_Block] = []

    @property
    def content(self) -> list[dict[str, Any]]:
        """All blocks as plain data."""
        return [block.whole() for block in self._blocks]

    def add(self, part: Part) -> str:
        """Takes the next piece of the answer."""
        if part.kind == "call":
            return self.begin("call", part.text)
        kind = "call" if part.kind == "arguments" else part.kind
        events = "" if self._blocks and self._blocks[-1].kind == kind else self.begin(kind)
        if not part.text:
            return events
        block = self._blocks[-1]
        block.texts.append(part.text)
        return events + block.begin + quoted(part.text) + CLOSE

    def begin(self, kind: str, name: str = "") -> str:
        """Begins a block; name: of the tool that is called."""
        ended = self._end()
        index, (delta, of_piece) = len(self._blocks), DELTAS[kind]
        head = {"type": "content_block_delta", "index": index}
        begin = json.dumps(head, separators=(",", ":"))[:-1] + f',"delta":{{"type":"{delta}","{of_piece}":'
        block = _Block(
            kind=kind, begin=f"event: content_block_delta\ndata: {begin}", fields=self._fields(kind, name)
        )
        self._blocks.append(block)
        return ended + event("content_block_start", index=index, content_block=block.fields)

    def close(self) -> str:
        """Ends the content; there is a block, though nothing may be written in it."""
        return ("" if self._blocks else self.begin("content")) + self._end()

    def _end(self) -> str:
        return event("content_block_stop", index=len(self._blocks) - 1) if self._blocks else ""

    def _fields(self, kind: str, name: str) -> dict[str, Any]:
        if kind == "call":
            id_ = self._new_id()
            id_ = f"toolu_{id_[5:]}" if id_.startswith("call_") else id_
            return {"type": "tool_use", "id": id_, "name": name, "input": {}}
        return {"type": "text", "text": ""} if kind == "content" else {**THINKING}


THINKING = {"type": "thinking", "thinking": "", "signature": ""}


def event(name: str, **fields: Any) -> str:
    """Returns an event of any fields."""
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields}, separators=(',', ':'))}\n\n"
