"""What a text of a model is read as: pieces of content, of reasoning, and of calls."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer; of a call first its name, then pieces of its arguments, which are JSON."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    index: int = 0  # of the call


class TextParser(Protocol):
    """Reads one answer as it grows; what it reads does not depend on how the text is cut."""

    def feed(self, text: str) -> list[Part]:
        """Returns what is certain by now, having taken more of the text; the work is linear in it."""

    def finish(self) -> list[Part]:
        """Returns the rest, when no more text comes."""


def as_json(value: Any) -> str:
    """Returns a value as JSON; half characters, which have no bytes, by their escapes."""
    text = json.dumps(value, ensure_ascii=False)
    return text if has_bytes(text) else json.dumps(value)


def has_bytes(text: str) -> bool:
    """Whether a text has no half characters, which answers cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def merged(parts: Iterable[Part]) -> list[Part]:
    """Returns the parts without empty ones, neighbours of one kind as one; a call's name stands alone."""
    found: list[Part] = []
    pieces: list[str] = []
    for part in parts:
        if part.kind != "call" and not part.text:
            continue
        last = found[-1] if found else None
        if last and part.kind != "call" and (last.kind, last.index) == (part.kind, part.index):
            pieces.append(part.text)
            continue
        _settle(found, pieces)
        found.append(part)
        pieces = [part.text]
    _settle(found, pieces)
    return found


def _settle(found: list[Part], pieces: list[str]) -> None:
    if len(pieces) > 1:
        found[-1] = Part(found[-1].kind, "".join(pieces), found[-1].index)


def held_back(text: str, markers: Iterable[str]) -> int:
    """Returns how many last characters of a text may be the beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return len(text) - start
    return 0
