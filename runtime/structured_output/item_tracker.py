"""How far a JSON text has come: what lists whose items are unique have, and what of the next is written."""

import json
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, NamedTuple

from .schema_places import Place

BLANKS = b" \t\n\r"
LIST, OBJECT = ord("["), ord("{")
NUMBERS = b"-0123456789"  # what they begin with
LONGEST_INT = 300  # digits that are read as a number


class Used:
    """The finished items of a list whose items are unique; others are made of it, and it stays."""

    __slots__ = ("_last", "_texts", "values")

    def __init__(self, values: frozenset[str] = frozenset(), texts: tuple[bytes, ...] = ()) -> None:
        """values: one text for all that are equal; texts: as they were written, less blanks, in order."""
        self.values, self._texts = values, texts
        self._last: tuple[bytes, Used | None] | None = None  # what was asked for last

    def with_item(self, text: bytes) -> "Used | None":
        """Returns these and another; None where it equals one of them."""
        if self._last is None or self._last[0] != text:
            self._last = text, self._made(text)
        return self._last[1]

    def _made(self, text: bytes) -> "Used | None":
        value = _one_text(text)
        if value in self.values:
            return None
        texts = list(self._texts)
        insort(texts, text)
        return Used(self.values | {value}, tuple(texts))

    def has_number(self, text: bytes) -> bool:
        """Whether a number that begins so, and may be done, equals one of them: 1. and 1.0 are 1."""
        if text[:1] not in NUMBERS or not 0 < len(text) <= LONGEST_INT:
            return False
        try:
            return _one_text(text.removesuffix(b".")) in self.values
        except ValueError:  # as of one that has no digits yet
            return False

    def following(self, beginning: bytes) -> tuple[bytes, ...]:
        """Returns the texts that begin so."""
        start = bisect_left(self._texts, beginning)
        return self._texts[start : bisect_left(self._texts, beginning + b"\xff", lo=start)]


class Held(NamedTuple):
    """A list or object that is open, or the whole text."""

    outer: "Held | None"
    place: Place
    kind: int
    is_within: bool  # this, or one around it, has unique items
    used: Used | None = None  # of a list with unique items
    start: int = 0  # where its current item begins in the text
    number: int = 0  # of its current item
    name: str | None = None  # of its current property; none where a name is to come

    def inner(self) -> Place:
        """Returns the place of the value that begins."""
        if self.kind == LIST:
            return self.place.item(self.number)
        return self.place if self.kind != OBJECT else self.place.property(self.name or "")


class Standing(NamedTuple):
    """Where a text stands; it never changes, so that one can go on from it in several ways."""

    held: Held
    text: bytes = b""  # less blanks: of what is within unique items, or of the name that is being written
    is_string: bool = False
    is_escaped: bool = False
    string_start: int = 0
    before: bytes | None = None  # what came of the reasoning, as far as it matters; none once the form began

    def is_name(self) -> bool:
        """Whether a name is being written, or is to come."""
        return self.held.kind == OBJECT and self.held.name is None

    def open_items(self) -> Iterator[tuple[Used, bytes]]:
        """Yields the used items of each open list whose items are unique, and what is written of its next."""
        held: Held | None = self.held
        while held is not None and held.is_within:
            if held.used is not None:
                yield held.used, self.text[held.start :]
            held = held.outer


class ItemTracker:
    """Follows texts of one form; what it follows is a Standing."""

    def __init__(self, place: Place, *, after: bytes | None = None, begun_by: bytes | None = None) -> None:
        """after: what ends the reasoning before the form; begun_by: what it begins with, if there is any."""
        self._after, self._begun_by = after, begun_by
        self.first = Standing(Held(None, place, 0, False), before=None if after is None else b"")

    def advanced(self, standing: Standing, data: bytes) -> Standing | None:
        """Returns where the text stands after these bytes; None where an item came twice."""
        if standing.before is not None:
            return self._begun(standing, standing.before + data)
        cursor = _Cursor(standing)
        return Standing(*cursor.state()) if cursor.read(data) else None

    def _begun(self, standing: Standing, before: bytes) -> Standing | None:
        """The same within the reasoning, or where it is not known whether there is any."""
        assert self._after is not None
        if self._begun_by is not None and not before.startswith(self._begun_by):
            if self._begun_by.startswith(before):
                return standing._replace(before=before)
            return self.advanced(standing._replace(before=None), before)
        start = len(self._begun_by or b"")
        end = before.find(self._after, start)
        if end < 0:
            return standing._replace(before=before[:start] + before[start:][-len(self._after) :])
        return self.advanced(standing._replace(before=None), before[end + len(self._after) :])


class _Cursor:
    """Reads bytes of valid JSON."""

    __slots__ = ("held", "is_escaped", "is_string", "string_start", "text")

    def __init__(self, standing: Standing) -> None:
        self.held, self.text, self.is_string, self.is_escaped, self.string_start, _ = standing

    def state(self) -> tuple[Held, bytes, bool, bool, int]:
        return self.held, self.text, self.is_string, self.is_escaped, self.string_start

    def read(self, data: bytes) -> bool:
        """Whether no item came twice."""
        place = 0
        while place < len(data):
            if self.is_string:
                place = self._in_string(data, place)
            elif not self._outside(data[place : place + 1]):
                return False
            else:
                place += 1
        return True

    @property
    def _is_name(self) -> bool:
        return self.held.kind == OBJECT and self.held.name is None

    def _in_string(self, data: bytes, start: int) -> int:
        """Reads on in a string, up to its end at most; returns where it ends, or all the bytes do."""
        place = start
        while place < len(data):
            byte = data[place : place + 1]
            place += 1
            if self.is_escaped:
                self.is_escaped = False
            elif byte == b"\\":
                self.is_escaped = True
            elif byte == b'"':
                self.is_string = False
                break
        if self.held.is_within or self._is_name:
            self.text += data[start:place]
            if not self.is_string:
                self._settle()
        return place

    def _settle(self) -> None:
        """Writes a string that is done as others that equal it are written; a name is known now."""
        written = self.text[self.string_start :]
        if b"\\" in written:
            plain = json.dumps(json.loads(written), ensure_ascii=False)
            self.text = self.text[: self.string_start] + plain.encode("utf-8", "surrogatepass")
        if self._is_name:
            name = json.loads(self.text[self.string_start :].decode("utf-8", "surrogatepass"))
            self.held = self.held._replace(name=name)

    def _outside(self, byte: bytes) -> bool:
        if byte in BLANKS:
            return True
        if byte == b"]" and not self._has_new_item():
            return False
        if byte == b"," and not self._next():
            return False
        if byte in b"[{":
            self._open(byte)
            return True
        if byte == b'"':
            self.is_string = True
            self.text = self.text if self.held.is_within else b""
            self.string_start = len(self.text)
        if self.held.is_within or (self.is_string and self._is_name):
            self.text += byte
        if byte == b",":
            is_outermost = self.held.outer is not None and not self.held.outer.is_within
            self.text = b"" if is_outermost and self.held.used is not None else self.text
            self.held = self.held._replace(start=len(self.text))
        if byte in b"]}" and self.held.outer is not None:
            self.held = self.held.outer
        return True

    def _open(self, byte: bytes) -> None:
        outer, place, kind = self.held, self.held.inner(), byte[0]
        used = Used() if kind == LIST and place.has_unique_items else None
        self.text = self.text + byte if outer.is_within else b""
        is_within = outer.is_within or used is not None
        self.held = Held(outer, place, kind, is_within, used, len(self.text))

    def _next(self) -> bool:
        if self.held.kind == OBJECT:
            self.held = self.held._replace(name=None)
            return True
        used = self.held.used
        if used is not None:
            used = used.with_item(self.text[self.held.start :])
            if used is None:
                return False
        self.held = self.held._replace(used=used, number=self.held.number + 1)
        return True

    def _has_new_item(self) -> bool:
        held = self.held
        text = self.text[held.start :]
        return held.used is None or not text or held.used.with_item(text) is not None


def _one_text(text: bytes) -> str:
    """Returns one text for all JSON that stands for equal values."""
    try:
        value = json.loads(text.decode("utf-8", "surrogatepass"), parse_int=_int)
        return json.dumps(_plain(value), sort_keys=True)
    except RecursionError:
        return "nested too deeply to be told from others"


def _int(digits: str) -> int | str:
    return int(digits) if len(digits) <= LONGEST_INT else digits


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
