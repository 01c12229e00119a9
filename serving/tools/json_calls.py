"""Calls as JSON, {"name": …, "arguments": {…}}, alone, in a list, and between markers."""

import json
import re
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from .brackets import Brackets
from .machine import CallMachine
from .parts import as_json, has_bytes

MAX_HEAD = 1024  # characters of a call before its arguments, as far as those are told piece by piece
MAX_VALUES = 20_000  # of a call that is read as a whole, which takes milliseconds
STRING = r'"((?:[^"\\]|\\.)*)"'
HEAD = re.compile(rf'\{{\s*"name"\s*:\s*{STRING}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)', re.DOTALL)
FIRST_KEY = re.compile(rf"\{{\s*(?:{STRING}|([^\s\"]))", re.DOTALL)
KEYS = ("name", "type", "function", "arguments", "parameters", "id")  # with one of them a call begins
NAMED = re.compile(r"([\w.:/-]{1,256})(?:\[CALL_ID\][\w-]{0,64})?(?:\[ARGS\])?\s{0,64}(?=\{)")
NAMES = re.compile(r"[\w.:/\-\[\]\s]{0,1024}")


class JsonCalls(CallMachine):
    """Reads calls that are JSON; their arguments are told as they are written, valid or not."""

    def __init__(
        self,
        openers: Sequence[str],
        closers: Sequence[str] = (),
        *,
        bare: Collection[str] = (),
        separators: str = "",
        is_named: bool = False,
    ) -> None:
        """openers: texts with which calls begin. closers: those that end them, if they are there.

        bare: names of tools; where an answer begins with a call of one of them, there needs to be no opener.
        separators: characters that divide calls which follow each other. is_named: whether a name may
        stand before the arguments alone, as [TOOL_CALLS]name{…}.
        """
        super().__init__(openers, closers, "{[" if bare else "")
        self._bare, self._separators, self._is_named = frozenset(bare), separators, is_named
        self._stops = "<" if any(marker[0] == "<" for marker in (*openers, *closers)) else ""
        self._brackets = Brackets()

    def opened(self, is_last: bool) -> bool:
        """Behind an opener: an object, a list of them, or a name."""
        self.hold_blanks()
        if not self.next:
            return False
        if self.next == "[":
            self.hold(self.at + 1)
            self.in_list = True
            return self.to(self._listed)
        if self.next == "{":
            return self.to(self._object)
        return self.to(self._name) if self._is_named else self.give_up(self.free)

    def _listed(self, is_last: bool) -> bool:
        """In a list, before a call or the end."""
        while self.next and (self.next == "," or self.next.isspace()):
            self.hold(self.at + 1)
        if not self.next:
            return False
        if self.next == "{":
            return self.to(self._object)
        if self.next != "]" or not self.num_calls:
            return self.give_up(self.free)
        self.held.clear()
        self.at += 1
        self.in_list = False
        return self.to(self._closing)

    def _object(self, is_last: bool) -> bool:
        """At the bracket of a call: by its first characters its arguments may be told as they come."""
        window = self.text[self.at : self.at + MAX_HEAD]
        head = HEAD.match(window)
        if head is not None:
            name = _unescaped(head[1])
            if name is None or (self.is_bare and name not in self._bare):
                return self.give_up(self.free)
            self.call(name)
            self.at += head.end()
            self._brackets = Brackets(stops=self._stops)
            return self.to(self._arguments)
        first = FIRST_KEY.match(window)
        if self.is_bare and first is not None and first[1] not in KEYS:
            return self.give_up(self.free)
        is_open = Brackets(stops=self._stops).scan(window, 0)[1] == "open"
        if is_open and len(window) < MAX_HEAD and not is_last:
            return False
        self._brackets = Brackets(stops=self._stops)
        self._object_text: list[str] = []
        return self.to(self._whole)

    def _arguments(self, is_last: bool) -> bool:
        end, how = self._brackets.scan(self.text, self.at)
        self.arguments(self.text[self.at : end])
        self.at = end
        if how == "closed":
            self._brackets = Brackets(1, stops=self._stops)
            return self.to(self._tail)
        return how == "broken" and self.to(self._closing)

    def _tail(self, is_last: bool) -> bool:
        """Behind the arguments, up to the end of their object; other fields mean nothing."""
        end, how = self._brackets.scan(self.text, self.at)
        self.hold(end)
        if how == "closed":
            self.held.clear()
            return self.to(self._listed if self.in_list else self._closing)
        return how == "broken" and self.give_up(self._closing)

    def _whole(self, is_last: bool) -> bool:
        """In a call whose fields are in another order, or that is none: read once it is all there."""
        start = self.at
        end, how = self._brackets.scan(self.text, start)
        self._object_text.append(self.text[start:end])
        self.hold(end)
        if how == "open":
            return False
        found = _call_of("".join(self._object_text)) if how == "closed" else None
        if found is None or (self.is_bare and found[0] not in self._bare):
            return self.give_up(self.free)
        self.call(found[0])
        self.arguments(found[1])
        return self.to(self._listed if self.in_list else self._closing)

    def _name(self, is_last: bool) -> bool:
        """At a name that stands before its arguments."""
        found = NAMED.match(self.text, self.at)
        if found is not None:
            self.call(found[1])
            self.at = found.end()
            self._brackets = Brackets(stops=self._stops)
            return self.to(self._named_arguments)
        names = NAMES.match(self.text, self.at)
        end = names.end() if names else self.at
        if end < len(self.text) or is_last or end - self.at > MAX_HEAD:
            return self.give_up(self.free)
        return False

    def _named_arguments(self, is_last: bool) -> bool:
        end, how = self._brackets.scan(self.text, self.at)
        self.arguments(self.text[self.at : end])
        self.at = end
        return how != "open" and self.to(self._closing)

    def _closing(self, is_last: bool) -> bool:
        """Behind a call: what closes it, a further one, or content."""
        self.hold_blanks()
        if (is_closed := self.close(is_last)) is not None:
            return is_closed
        if not self.next:
            return False
        if self.next == "{":
            return self.to(self._object)
        if self.next in self._separators:
            self.hold(self.at + 1)
            return self.to(self._again)
        return self.give_up(self.free)

    def _again(self, is_last: bool) -> bool:
        """Behind a separator."""
        self.hold_blanks()
        if not self.next:
            return False
        return self.to(self._object) if self.next == "{" else self.give_up(self.free)


def _unescaped(text: str) -> str | None:
    try:
        name = str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return None
    return name if name and has_bytes(name) else None


def _call_of(text: str) -> tuple[str, str] | None:
    """Returns the name and the arguments of a call, whichever way it is written; None for none."""
    if text.count(",") + text.count("[") > MAX_VALUES:
        return None
    try:
        found = json.loads(text, strict=False, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    if isinstance(found.get("function"), dict):
        found = found["function"]
    name = found.get("name")
    given = found.get("arguments", found.get("parameters"))
    if not isinstance(name, str) or not name or not has_bytes(name):
        return None
    arguments = _arguments(given)
    return None if arguments is None else (name, arguments)


def _arguments(given: Any) -> str | None:
    if isinstance(given, str):
        try:
            return given if isinstance(json.loads(given), dict) else None
        except (ValueError, RecursionError):
            return None
    if given is None:
        return "{}"
    return as_json(given) if isinstance(given, dict) else None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)
