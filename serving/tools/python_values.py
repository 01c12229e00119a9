"""Calls in Python's notation as names and JSON: text is read, and nothing is run."""

import json
import re

from .parts import as_json

TOKEN = re.compile(
    r"""\s*(?:(?P<string>"[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*')"""
    r"""|(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)|(?P<word>[^\W\d][\w.]*)|(?P<mark>[\[\](){},:=]))""",
    re.DOTALL,
)
JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
MAX_DEPTH = 100
MAX_VALUES = 4000  # of a call, so that it is read in milliseconds


class _Wrong(Exception):
    """The text is no call."""


def python_call(text: str) -> tuple[str, str] | None:
    """Returns the name and the arguments, as JSON, of a text as name(key=value, …); None for any other."""
    if text.count(",") + text.count("[") > MAX_VALUES:
        return None
    try:
        return _Reader(text).call()
    except _Wrong:
        return None


class _Reader:
    """Reads one call, token by token."""

    def __init__(self, text: str) -> None:
        self._name, _, self._text = text.partition("(")
        self._at = 0
        self._kind, self._token = "", ""
        self._advance()

    def call(self) -> tuple[str, str]:
        pairs: list[str] = []
        while self._token != ")":
            key = self._taken("word")
            self._expect("=")
            pairs.append(f"{json.dumps(key)}: {self._value(0)}")
            if self._token != ")":
                self._expect(",")
        self._advance()
        if self._kind != "end":
            raise _Wrong
        return self._name.strip(), "{" + ", ".join(pairs) + "}"

    def _value(self, depth: int) -> str:
        kind, token = self._kind, self._token
        if depth > MAX_DEPTH:
            raise _Wrong
        self._advance()
        if kind == "string":
            return _string(token)
        if kind == "number" and JSON_NUMBER.fullmatch(token):
            return token
        if kind == "word" and token in WORDS:
            return WORDS[token]
        if kind == "mark" and token in "[(":
            return "[" + ", ".join(self._items("]" if token == "[" else ")", depth)) + "]"
        if kind == "mark" and token == "{":
            return "{" + ", ".join(self._items("}", depth, has_keys=True)) + "}"
        raise _Wrong

    def _items(self, end: str, depth: int, has_keys: bool = False) -> list[str]:
        items: list[str] = []
        while self._token != end or self._kind != "mark":
            item = ""
            if has_keys:
                item = _string(self._taken("string"))
                self._expect(":")
                item += ": "
            items.append(item + self._value(depth + 1))
            if self._token != end or self._kind != "mark":
                self._expect(",")
        self._advance()
        return items

    def _taken(self, kind: str) -> str:
        token = self._token
        if self._kind != kind:
            raise _Wrong
        self._advance()
        return token

    def _expect(self, mark: str) -> None:
        if self._kind != "mark" or self._token != mark:
            raise _Wrong
        self._advance()

    def _advance(self) -> None:
        found = TOKEN.match(self._text, self._at)
        if found is None:
            is_end = not self._text[self._at :].strip()
            self._kind, self._token = ("end" if is_end else "wrong"), ""
            return
        self._at = found.end()
        self._kind = str(found.lastgroup)
        self._token = found[self._kind]


def _string(token: str) -> str:
    """Returns a string, quoted either way, as JSON."""
    if token[0] == '"':
        try:
            return as_json(json.loads(token))
        except ValueError:
            pass  # escapes of Python's, or line ends
    text = ESCAPE.sub(_unescaped, token[1:-1])
    return as_json(text)


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2]
    if code:
        return chr(int(code, 16))
    return ESCAPED.get(found[3], found[3] if found[3] in "\"'\\/" else found[0])
