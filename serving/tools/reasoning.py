"""Reasoning before an answer, shown apart by its tags."""

from dataclasses import dataclass

from .machine import Machine
from .parts import Part, held_back


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningTags:
    """Texts between which a model reasons."""

    begin: str
    end: str

    def is_open(self, prompt_end: str) -> bool:
        """Whether a prompt that ends so has begun the reasoning."""
        return prompt_end.rstrip().endswith(self.begin)

    def is_over(self, prompt_end: str) -> bool:
        """Whether a prompt that ends so has ended it, so that there is none."""
        return prompt_end.rstrip().endswith(self.end)


class ReasoningParser(Machine):
    """Reads what stands between the tags at the beginning of an answer as reasoning, and all else as content.

    Blanks around the reasoning belong to neither.
    """

    def __init__(self, tags: ReasoningTags, *, is_open: bool = False) -> None:
        """is_open: whether the prompt has begun the reasoning."""
        super().__init__()
        self._tags, self._is_open = tags, is_open

    def begin(self, is_last: bool) -> bool:
        """Before any text."""
        self.hold_blanks()
        begin = self._tags.begin
        there = self.text[self.at : self.at + len(begin)]
        if there == begin:
            self.held.clear()
            self.at += len(begin)
            return self.to(self._blanks)
        if (not there or begin.startswith(there)) and not is_last:
            return False
        if self._is_open:
            self.held.clear()
            return self.to(self._reasoning)
        return self.give_up(self._content)

    def _blanks(self, is_last: bool) -> bool:
        self.hold_blanks()
        self.held.clear()
        return bool(self.next) and self.to(self._reasoning)

    def _reasoning(self, is_last: bool) -> bool:
        end = self.text.find(self._tags.end, self.at)
        if end < 0:
            rest = self.text[self.at :]
            stop = self.at + len(rest) - (0 if is_last else held_back(rest, (self._tags.end,)))
            self._reason(stop)
            return False
        self._reason(end)
        self.held.clear()
        self.at += len(self._tags.end)
        return self.to(self._after)

    def _reason(self, end: int) -> None:
        """Tells the text up to there, but holds blanks at its end."""
        piece = self.text[self.at : end]
        kept = piece.rstrip()
        if kept:
            self._parts.append(Part("reasoning", "".join(self.held) + kept))
            self.held.clear()
        if len(piece) > len(kept):
            self.held.append(piece[len(kept) :])
        self.at = end

    def _after(self, is_last: bool) -> bool:
        self.hold_blanks()
        self.held.clear()
        return bool(self.next) and self.to(self._content)

    def _content(self, is_last: bool) -> bool:
        self.content(self.text[self.at :])
        self.at = len(self.text)
        return False

    def finish(self) -> list[Part]:
        """Returns the rest; blanks at the end of reasoning are left out."""
        parts = super().finish()
        in_reasoning = self.state in (self._reasoning, self._blanks, self._after)
        return [part for part in parts if not (in_reasoning and part.kind == "content")]
