"""Token ids to text, piece by piece: never taken back, in the end equal to decoding everything at once."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Protocol

REPLACEMENT = "\ufffd"
WINDOW = 8  # tokens decoded at a time, a few more while a character is incomplete


class Decoder(Protocol):
    """What is asked of a tokenizer."""

    @property
    def special_tokens(self) -> Mapping[int, str]: ...
    @property
    def byte_token_ids(self) -> frozenset[int]: ...
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class IncrementalDetokenizer:
    """The text of one answer as it grows.

    Three stretches of text follow each other: what was given out, what is certain but may be the beginning of
    a stop string, and what later tokens may still change. The last exists while bytes of a character are
    missing and, with SentencePiece's byte tokens, until another token comes: one bad byte spoils a whole run.

    A stop string is found in the token that completes it, but not within the first min_tokens tokens. Of
    several the first to be complete counts, then the first to begin.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
    ) -> None:
        self.num_tokens = 0  # taken so far; those after a stop are not
        self.stop_reason: str | None = None
        self._window = _Window(tokenizer, skip_special_tokens)
        self._stop = tuple(stop)
        self._hidden_stops = _hidden_stops(tokenizer, stop) if skip_special_tokens else {}
        self._min_tokens = min_tokens
        self._include_stop = include_stop_str_in_output
        self._pieces: list[str] = []
        self._held = ""  # certain, not yet given out
        self._visible = ""  # _held and the uncertain text after it

    @property
    def text(self) -> str:
        """Everything given out so far."""
        return "".join(self._pieces)

    def append(self, token_ids: Sequence[int]) -> str:
        """Take tokens, up to the one that completes a stop string; the text that is now certain."""
        return "".join([self._append(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """The rest of the text, when no more tokens will come."""
        return self._give(self._visible, held="", visible="")

    def _append(self, token_id: int) -> str:
        if self.stop_reason is not None:
            return ""
        self.num_tokens += 1
        may_stop = self.num_tokens > self._min_tokens
        if may_stop and token_id in self._hidden_stops:
            return self._end(self._visible, self._hidden_stops[token_id])
        certain = self._held + self._window.append(token_id)
        visible = certain + self._window.uncertain
        if may_stop:
            found = _first_stop(self._stop, visible, _num_equal(self._visible, visible))
            if found is not None:
                return self._end(visible[: found[0]], found[1])
        cut = len(certain) - _num_held_back(self._stop, certain)
        return self._give(certain[:cut], held=certain[cut:], visible=visible[cut:])

    def _end(self, before: str, stop: str) -> str:
        self.stop_reason = stop
        return self._give(before + stop if self._include_stop else before, held="", visible="")

    def _give(self, piece: str, *, held: str, visible: str) -> str:
        self._held, self._visible = held, visible
        self._pieces.append(piece)
        return piece


class _Window:
    """The last few tokens, decoded together: spaces and split characters depend on a token's context.

    The first of them serve only as that context: a tokenizer may strip the space that begins a text, so a
    window must begin with a token that has text of its own to lose it from.
    """

    def __init__(self, tokenizer: Decoder, skip_special_tokens: bool) -> None:
        self.uncertain = ""  # what the tokens after the certain text look like now
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._certain = ""  # text of the window that no later token changes
        self._border = 0  # number of tokens in it

    def append(self, token_id: int) -> str:
        """The text that this token makes certain."""
        if self._skip_special_tokens and token_id in self._tokenizer.special_tokens:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        new = text[len(self._certain) :]
        if new == self.uncertain:  # a token without text: what was uncertain still is
            return ""
        if token_id in self._tokenizer.byte_token_ids or new.endswith(REPLACEMENT):
            self.uncertain = new
            return ""
        self.uncertain = ""
        self._advance(text)
        return new

    def _advance(self, text: str) -> None:
        if len(self._ids) > WINDOW:
            last = self._ids[self._border :]
            shown = self._decode(last)
            if text.endswith(shown):  # else this decoder needs its context from further back
                self._ids, text = last, shown
        self._certain, self._border = text, len(self._ids)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _hidden_stops(tokenizer: Decoder, stop: Sequence[str]) -> dict[int, str]:
    """Stop strings that are the text of a special token, which skip_special_tokens keeps out of the text."""
    return {token_id: text for token_id, text in tokenizer.special_tokens.items() if text in stop}


def _first_stop(stop: Sequence[str], text: str, seen: int) -> tuple[int, str] | None:
    """Where the first stop string begins that ends after `seen` characters, and which it is."""
    starts = ((text.find(string, max(0, seen - len(string) + 1)), string) for string in stop)
    found = [(start + len(string), start, string) for start, string in starts if start >= 0]
    return min(found)[1:] if found else None


def _num_equal(old: str, new: str) -> int:
    """How many characters from the start the two have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))


def _num_held_back(stop: Sequence[str], text: str) -> int:
    """Length of the longest end of the text that begins a stop string."""
    longest = 0
    for string in stop:
        lengths = range(min(len(string) - 1, len(text)), longest, -1)
        longest = next((length for length in lengths if text.endswith(string[:length])), longest)
    return longest
