"""Calls in Python's notation, [name(key=value), …], as Llama 3.2, Llama 4 and Gemma write them."""

import re
from collections.abc import Sequence

from .brackets import Brackets
from .machine import CallMachine
from .python_values import python_call

MAX_NAME = 256  # characters before the arguments
NAME = re.compile(r"\s*[\w.-]+\(")
BEGINNING = re.compile(r"\s*[\w.-]*")
PRINT = "print("


class PythonCalls(CallMachine):
    """Reads lists of calls, at the beginning of an answer or behind an opener; a call is told as a whole."""

    def __init__(
        self, openers: Sequence[str] = (), closers: Sequence[str] = (), *, is_bare: bool = True
    ) -> None:
        """openers: texts behind which calls stand, in a list or not. closers: what may end those.

        is_bare: whether an answer may begin with a list without an opener.
        """
        super().__init__(openers, closers, "[" if is_bare else "")
        self._in_print = False
        self._pieces: list[str] = []
        self._brackets = Brackets()

    def opened(self, is_last: bool) -> bool:
        self.hold_blanks()
        if not self.next:
            return False
        if self.next == "[":
            self.hold(self.at + 1)
            self.in_list = True
        elif self.openers and not is_last and PRINT.startswith(self.text[self.at : self.at + len(PRINT)]):
            if not self.text.startswith(PRINT, self.at):
                return False
            self.hold(self.at + len(PRINT))
            self._in_print = True
        return self.to(self._before_call)

    def _before_call(self, is_last: bool) -> bool:
        self.hold_blanks()
        window = self.text[self.at : self.at + MAX_NAME]
        if NAME.match(window):
            self._brackets = Brackets(quotes="\"'")
            self._pieces = []
            return self.to(self._call)
        beginning = BEGINNING.match(window)
        could_be = beginning is not None and beginning.end() == len(window) < MAX_NAME
        return not (could_be and not is_last) and self.give_up(self.free)

    def _call(self, is_last: bool) -> bool:
        start = self.at
        end, how = self._brackets.scan(self.text, start)
        self._pieces.append(self.text[start:end])
        self.hold(end)
        if how == "open":
            return False
        found = python_call("".join(self._pieces))
        if found is None:
            return self.give_up(self.free)
        self.call(found[0])
        self.arguments(found[1])
        return self.to(self._behind_call)

    def _behind_call(self, is_last: bool) -> bool:
        """Behind a call: a further one, the end of the list, what closes it, or content."""
        self.hold_blanks()
        if not self.next:
            return False
        if self._in_print and self.next == ")":
            self._in_print = False
            self.at += 1
            return True
        if self.in_list and self.next in ",]":
            if self.next == ",":
                self.hold(self.at + 1)
                return self.to(self._before_call)
            self.in_list = False
            self.at += 1
            return True
        is_closed = self.close(is_last)
        return self.give_up(self.free) if is_closed is None else is_closed
