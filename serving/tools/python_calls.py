"""Calls in Python's notation, [name(key=value), …], as Llama 3.2, Llama 4 and Gemma write them."""

import re
from collections.abc import Sequence

from .brackets import Brackets
from .machine import Machine
from .parts import held_back
from .python_values import python_call

MAX_NAME = 256  # characters before the arguments
NAME = re.compile(r"\s*([A-Za-z_][\w.]*)\(")
BEGINNING = re.compile(r"\s*(?:[A-Za-z_][\w.]*)?")
PRINT = "print("


class PythonCalls(Machine):
    """Reads lists of calls, at the beginning of an answer or behind an opener; a call is told as a whole."""

    def __init__(
        self, openers: Sequence[str] = (), closers: Sequence[str] = (), *, is_bare: bool = True
    ) -> None:
        """openers: texts behind which calls stand, in a list or not. closers: what may end those.

        is_bare: whether an answer may begin with a list without an opener.
        """
        super().__init__()
        self._openers, self._closers, self._is_bare = tuple(openers), tuple(closers), is_bare
        self._opener = re.compile("|".join(map(re.escape, openers)) or r"(?!)")
        self._in_list = self._in_print = False
        self._pieces: list[str] = []
        self._brackets = Brackets()

    def begin(self, is_last: bool) -> bool:
        """Before any text: a list of calls may stand there without an opener."""
        if not self._is_bare:
            return self.to(self._free)
        self.hold_blanks()
        if not self.next:
            return False
        if self.next != "[":
            return self.give_up(self._free)
        self.hold(self.at + 1)
        self._in_list = True
        return self.to(self._before_call)

    def _free(self, is_last: bool) -> bool:
        found = self._opener.search(self.text, self.at)
        if found is None:
            rest = self.text[self.at :]
            num_held = 0 if is_last else held_back(rest, self._openers)
            self.content(rest[: len(rest) - num_held])
            self.at = len(self.text) - num_held
            return False
        self.content(self.text[self.at : found.start()])
        self.at = found.start()
        self.hold(found.end())
        self._in_list = False
        return self.to(self._opened)

    def _opened(self, is_last: bool) -> bool:
        self.hold_blanks()
        if not self.next:
            return False
        if self.next == "[":
            self.hold(self.at + 1)
            self._in_list = True
        elif self._openers and not is_last and PRINT.startswith(self.text[self.at : self.at + len(PRINT)]):
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
        return not (could_be and not is_last) and self.give_up(self._free)

    def _call(self, is_last: bool) -> bool:
        start = self.at
        end, how = self._brackets.scan(self.text, start)
        self._pieces.append(self.text[start:end])
        self.hold(end)
        if how == "open":
            return False
        found = python_call("".join(self._pieces))
        if found is None:
            return self.give_up(self._free)
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
        if self._in_list and self.next in ",]":
            if self.next == ",":
                self.hold(self.at + 1)
                return self.to(self._before_call)
            self._in_list = False
            self.at += 1
            return True
        if not is_last and held_back(self.text[self.at : self.at + 32], self._closers):
            return False
        for closer in self._closers:
            if self.text.startswith(closer, self.at):
                self.held.clear()
                self.at += len(closer)
                return self.to(self._free)
        return self.give_up(self._free)
