"""One answer of a chat, read as reasoning, content and calls."""

import uuid
from dataclasses import dataclass, field
from typing import Any

from .parts import Part, TextParser, merged

CHUNK = 1 << 14  # characters that are read at a time


@dataclass(slots=True, eq=False, kw_only=True)
class AnswerReader:
    """Reads one answer as it grows: pieces joined are the same, however it is cut.

    Blanks beside calls are left out; without a call, content is what the model wrote.
    """

    reasoning: TextParser | None = None
    tools: TextParser | None = None
    shows_reasoning: bool = True
    id_length: int = 32  # letters and digits of a call's id
    has_calls: bool = False
    has_reasoning: bool = False
    _blanks: list[str] = field(default_factory=list)  # that are content once more of it comes

    def feed(self, text: str) -> list[Part]:
        """Returns what is new and certain, having taken more of the text."""
        return self._read([Part("content", text)] if self.reasoning is None else self.reasoning.feed(text))

    def finish(self) -> list[Part]:
        """Returns the rest, once the answer has ended."""
        parts = self._read([] if self.reasoning is None else self.reasoning.finish())
        if self.tools is not None:
            parts += self._shown(self.tools.finish())
            if self._blanks and not self.has_calls:
                parts.append(Part("content", "".join(self._blanks)))
        return merged(parts)

    def whole(self, text: str) -> list[Part]:
        """Returns what a whole answer holds."""
        parts = [part for at in range(0, len(text), CHUNK) for part in self.feed(text[at : at + CHUNK])]
        return merged(parts + self.finish())

    def new_id(self) -> str:
        """Returns an id for a call, which no other has."""
        number = uuid.uuid4().hex
        return f"call_{number}" if self.id_length > 16 else number[: self.id_length]

    def _read(self, parts: list[Part]) -> list[Part]:
        found: list[Part] = []
        for part in parts:
            if part.kind == "reasoning":
                self.has_reasoning = True
                found += [part] if self.shows_reasoning else []
            elif self.tools is None:
                found.append(part)
            else:
                found += self._shown(self.tools.feed(part.text))
        return found

    def _shown(self, parts: list[Part]) -> list[Part]:
        """Returns the parts, the blanks at the end of content held until more of it comes."""
        found: list[Part] = []
        for part in parts:
            if part.kind != "content":
                self._blanks.clear()
                self.has_calls = True
                found.append(part)
                continue
            kept = part.text.rstrip()
            if kept:
                found.append(Part("content", "".join(self._blanks) + kept))
                self._blanks.clear()
            if len(part.text) > len(kept):
                self._blanks.append(part.text[len(kept) :])
        return found


def message_of(reader: AnswerReader, text: str) -> dict[str, Any]:
    """Returns the message of a whole answer, as OpenAI's clients read it."""
    contents: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in reader.whole(text):
        if part.kind == "content":
            contents.append(part.text)
        elif part.kind == "reasoning":
            reasoning.append(part.text)
        elif part.kind == "call":
            function = {"name": part.text, "arguments": ""}
            calls.append({"id": reader.new_id(), "type": "function", "function": function})
        else:
            calls[part.index]["function"]["arguments"] += part.text
    nothing = None if reader.has_calls or reader.has_reasoning else ""
    message: dict[str, Any] = {"role": "assistant", "content": "".join(contents) or nothing, "refusal": None}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    return {**message, "tool_calls": calls} if calls else message
