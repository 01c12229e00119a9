"""What parsers of calls and of reasoning share: states take from a text what is certain, parts go out."""

import re
from collections.abc import Callable, Sequence

from .parts import Part, held_back, merged

State = Callable[[bool], bool]


class Machine:
    """A parser in one state at a time. A state takes text from `at` on and returns whether it got on.

    A state is told whether the text is at its end, and else decides nothing that more text could change, so
    cuts do not matter. What is taken and not yet understood waits in `held`, so `text` stays short.
    """

    def __init__(self) -> None:
        self.state: State = self.begin
        self.text = ""
        self.at = 0  # where in it what is not yet taken begins
        self.held: list[str] = []  # as written, since what was last understood
        self.num_calls = 0
        self._parts: list[Part] = []

    def begin(self, is_last: bool) -> bool:
        """The state before any text."""
        raise NotImplementedError

    def feed(self, text: str) -> list[Part]:
        """Returns what is certain by now, having taken more of the text."""
        self.text, self.at = self.text[self.at :] + text, 0
        return self._run(False)

    def finish(self) -> list[Part]:
        """Returns the rest; what has not become a call is content as it was written."""
        return self._run(True)

    @property
    def next(self) -> str:
        """The character that comes, "" where none is there yet."""
        return self.text[self.at : self.at + 1]

    def hold(self, end: int) -> None:
        """Takes the text up to there, to be content unless a call comes of it."""
        if end > self.at:
            self.held.append(self.text[self.at : end])
            self.at = end

    def hold_blanks(self) -> None:
        """Holds the blanks that come."""
        end = self.at
        while self.text[end : end + 1].isspace():
            end += 1
        self.hold(end)

    def to(self, state: State) -> bool:
        """Goes on in that state."""
        self.state = state
        return True

    def give_up(self, state: State) -> bool:
        """What is held was content; goes on in that state."""
        self.content("".join(self.held))
        self.held.clear()
        return self.to(state)

    def content(self, text: str) -> None:
        """Gives text out as content."""
        self._parts.append(Part("content", text))

    def call(self, name: str) -> None:
        """Gives out that a call of this name begins; what is held belonged to it."""
        self.held.clear()
        self._parts.append(Part("call", name, self.num_calls))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Gives out a piece of the arguments of the last call."""
        self._parts.append(Part("arguments", text, self.num_calls - 1))

    def _run(self, is_last: bool) -> list[Part]:
        while self.state(is_last):
            pass
        if is_last:
            self.hold(len(self.text))
            self.content("".join(self.held))
            self.held.clear()
        parts, self._parts = self._parts, []
        return merged(parts)


class CallMachine(Machine):
    """A parser of calls between markers: content up to an opener, calls, and what closes them."""

    def __init__(self, openers: Sequence[str], closers: Sequence[str], starts: str = "") -> None:
        """openers: texts with which calls begin. closers: those that end them, if they are there.

        starts: characters with which an answer may begin that is a call without an opener.
        """
        super().__init__()
        self.openers, self.closers, self.starts = tuple(openers), tuple(closers), starts
        self.is_bare = self.in_list = False  # whether the call has no opener; whether it is one of a list
        self._opener = re.compile("|".join(map(re.escape, openers)) or r"(?!)")

    def begin(self, is_last: bool) -> bool:
        """Before any text: a call may stand there without an opener."""
        if not self.starts:
            return self.to(self.free)
        self.hold_blanks()
        if not self.next:
            return False
        if self.next not in self.starts:
            return self.give_up(self.free)
        self.is_bare = True
        return self.to(self.opened)

    def opened(self, is_last: bool) -> bool:
        """The state behind an opener."""
        raise NotImplementedError

    def free(self, is_last: bool) -> bool:
        """In content, up to the next opener."""
        found = self._opener.search(self.text, self.at)
        if found is None:
            rest = self.text[self.at :]
            num_held = 0 if is_last else held_back(rest, self.openers)
            self.content(rest[: len(rest) - num_held])
            self.at = len(self.text) - num_held
            return False
        self.content(self.text[self.at : found.start()])
        self.at = found.start()
        self.hold(found.end())
        self.is_bare = self.in_list = False
        return self.to(self.opened)

    def close(self, is_last: bool) -> bool | None:
        """Takes what closes a call; returns whether it got on, None where nothing of the kind stands here."""
        if not is_last and held_back(self.text[self.at : self.at + 32], self.closers):
            return False
        for closer in self.closers:
            if self.text.startswith(closer, self.at):
                self.held.clear()
                self.at += len(closer)
                return self.to(self.free)
        return None
