"""What parsers of calls share: text comes in, states take from it what is certain, parts go out."""

from collections.abc import Callable

from .parts import Part, merged

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
