"""Where a value in brackets ends, found as its text comes in."""

import re
from typing import Literal

PLAIN = re.compile(r"[^\"'{}\[\]()<]*")
IN_STRING = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}
OPENING, CLOSING = "{[(", "}])"


class Brackets:
    """Counts brackets outside strings, of JSON or, with both quotes, of Python."""

    def __init__(self, depth: int = 0, *, quotes: str = '"', stops: str = "") -> None:
        """depth: of brackets that are open. stops: characters that cannot stand outside strings."""
        self.depth = depth
        self._quotes, self._stops = quotes, stops
        self._quote = ""  # of the string that is open
        self._is_escaped = False

    def scan(self, text: str, at: int) -> tuple[int, Literal["open", "closed", "broken"]]:
        """Returns how far the value reaches in the text, and whether it has ended there.

        broken: by a character that cannot stand there, which is not taken.
        """
        while at < len(text):
            if self._quote:
                at = self._scan_string(text, at)
                continue
            found = PLAIN.match(text, at)
            at = found.end() if found else at
            char = text[at : at + 1]
            if not char:
                break
            if char in self._stops:
                return at, "broken"
            at += 1
            if char in self._quotes:
                self._quote = char
            elif char in OPENING:
                self.depth += 1
            elif char in CLOSING:
                self.depth -= 1
                if self.depth <= 0:
                    return at, "closed"
        return at, "open"

    def _scan_string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        found = IN_STRING[self._quote].match(text, at)
        at = found.end() if found else at
        char = text[at : at + 1]
        if char == self._quote:
            self._quote = ""
        self._is_escaped = char == "\\"
        return at + 1 if char else at
