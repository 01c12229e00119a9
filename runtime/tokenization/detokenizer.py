"""Token ids to text, piece by piece: never taken back, in the end equal to decoding everything at once."""

from collections.abc import Sequence
from itertools import takewhile

from ..sampling_params import SamplingParams
from .plain_tokens import REPLACEMENT
from .text_window import WINDOW, Decoder, TextWindow

__all__ = ["WINDOW", "IncrementalDetokenizer", "detokenizer_of", "text_after"]

PENDING = "\ud800"  # in no stop string, as none may hold a surrogate


class IncrementalDetokenizer:
    """The text of one answer as it grows: what decoding prompt and answer adds to decoding the prompt.

    Three stretches of text follow each other: what was given out, what is certain but may be the beginning of
    a stop string, and what later tokens may still change. The last exists while bytes of a character are
    missing and, with SentencePiece's byte tokens, until another token comes: one bad byte spoils a whole run.

    A stop string is found in the token that completes it, but not within the first min_tokens tokens, nor in
    the � of a character whose bytes are still to come: if none come, at the end. Of several the first to be
    complete counts, then the first to begin. The work for a token does not grow with the text.
    """

    __slots__ = (  # one is looked at for every token: what lies together is found sooner
        *("num_tokens", "stop_reason", "_tokenizer", "_window", "_stop", "_beginnings", "_longest_stop"),
        *("_hidden_stops", "_min_tokens", "_include_stop", "_held", "_uncertain", "_recent"),
    )

    def __init__(
        self,
        tokenizer: Decoder,
        *,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
    ) -> None:
        self.num_tokens = 0  # taken so far; those after a stop are not
        self.stop_reason: str | None = None
        self._tokenizer = tokenizer
        self._window = TextWindow(tokenizer, prompt_token_ids, skip_special_tokens)
        self._stop = tuple(stop)
        self._beginnings = frozenset(string[0] for string in self._stop)  # of stop strings
        self._longest_stop = max(map(len, self._stop), default=0)
        self._hidden_stops = _hidden_stops(tokenizer, stop) if skip_special_tokens else {}
        self._min_tokens = min_tokens
        self._include_stop = include_stop_str_in_output
        self._held = ""  # certain, not yet given out
        self._uncertain: list[str] = []  # the text after it, as it looks now
        self._recent = ""  # where the two end, as far as a stop string may begin in it

    def append(self, token_ids: Sequence[int]) -> str:
        """Takes tokens, up to the one that completes a stop string; returns the text they make certain."""
        return "".join([self.append_token(token_id) for token_id in token_ids])

    def append_stop_token(self, token_id: int) -> str:
        """Takes a token whose id ends the answer; returns the text it makes certain."""
        self.num_tokens += 1
        if not self._include_stop:
            return ""
        special = self._tokenizer.special_tokens.get(token_id)
        if special is not None:
            rest = self.finish()
            return rest if self.stop_reason is not None else rest + special
        self._take(token_id)
        return ""

    def finish(self) -> str:
        """Returns the rest of the text, when no more tokens come."""
        if self.stop_reason is not None:
            return ""
        before, rest = self._held + "".join(self._uncertain), self._held + self._window.finish()
        self._held, self._uncertain = "", []
        may_stop = self.num_tokens > self._min_tokens
        found = _first_stop(self._stop, rest, _num_equal(before, rest)) if may_stop else None
        return rest if found is None else self._end(rest[: found[0]], found[1])

    def append_token(self, token_id: int) -> str:
        """As append() of one token."""
        if self.stop_reason is not None:
            return ""
        self.num_tokens += 1
        if not (self._held or self._uncertain):
            text = self._window.take_plain(token_id, self._beginnings)
            if text is not None:
                self._recent = ""  # no stop string begins in what was told
                return text
        may_stop = self.num_tokens > self._min_tokens
        if may_stop and token_id in self._hidden_stops:
            return self._end(self._visible(), self._hidden_stops[token_id])
        searched, seen = self._take(token_id)
        found = _first_stop(self._stop, searched, seen) if may_stop else None
        if found is not None:
            visible = self._visible()
            return self._end(visible[: len(visible) - len(searched) + found[0]], found[1])
        if self._longest_stop:
            self._recent = searched[-self._longest_stop + 1 :] if self._longest_stop > 1 else ""
        cut = len(self._held) - _num_held_back(self._stop, self._held)
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain

    def _take(self, token_id: int) -> tuple[str, int]:
        """Adds a token's text; returns where a stop string may lie, and how much of it was searched."""
        certain, uncertain = self._window.append(token_id)
        if not self._window.is_settled:  # what was there stands, and goes on
            self._uncertain.append(uncertain)
            return self._recent + uncertain, len(self._recent)
        before = self._held + "".join(self._uncertain)
        self._held += certain
        self._uncertain = [_masked(uncertain)] if uncertain else []
        visible = self._held + "".join(self._uncertain)
        return visible, _num_equal(before, visible) if self._stop else 0

    def _visible(self) -> str:
        return "".join([self._held, *self._uncertain]).replace(PENDING, REPLACEMENT)

    def _end(self, before: str, stop: str) -> str:
        self.stop_reason = stop
        self._held, self._uncertain = "", []
        return before + stop if self._include_stop else before


def detokenizer_of(
    params: SamplingParams, prompt_token_ids: Sequence[int], tokenizer: Decoder
) -> IncrementalDetokenizer:
    """Returns a detokenizer for an answer with these parameters to this prompt."""
    return IncrementalDetokenizer(
        tokenizer,
        prompt_token_ids=prompt_token_ids,
        stop=tuple(params.stop or ()),
        min_tokens=params.min_tokens,
        skip_special_tokens=params.skip_special_tokens,
        include_stop_str_in_output=params.include_stop_str_in_output,
    )


def text_after(
    tokenizer: Decoder,
    prompt_token_ids: Sequence[int],
    token_ids: Sequence[int],
    skip_special_tokens: bool = True,
) -> str:
    """Returns the text of an answer: what its tokens add to the text of the prompt."""
    detokenizer = IncrementalDetokenizer(
        tokenizer, prompt_token_ids=prompt_token_ids, skip_special_tokens=skip_special_tokens
    )
    return detokenizer.append(token_ids) + detokenizer.finish()


def _masked(uncertain: str) -> str:
    """Returns the text with PENDING for bytes at its end that a later token may complete."""
    shown = uncertain.rstrip(REPLACEMENT)
    return shown + PENDING * (len(uncertain) - len(shown))


def _hidden_stops(tokenizer: Decoder, stop: Sequence[str]) -> dict[int, str]:
    """Returns, by id, the stop strings that are special tokens, which are not seen in the text."""
    if not stop:
        return {}
    wanted = frozenset(stop)
    return {token_id: text for token_id, text in tokenizer.special_tokens.items() if text in wanted}


def _first_stop(stop: Sequence[str], text: str, seen: int) -> tuple[int, str] | None:
    """Returns where the first stop string that ends after `seen` characters begins, and itself; else None."""
    starts = ((text.find(string, max(0, seen - len(string) + 1)), string) for string in stop)
    found = [(start + len(string), start, string) for start, string in starts if start >= 0]
    return min(found)[1:] if found else None


def _num_equal(old: str, new: str) -> int:
    """Returns the number of characters from the start that the two have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))


def _num_held_back(stop: Sequence[str], text: str) -> int:
    """Returns the length of the longest end of the text that begins a stop string."""
    longest = 0
    for string in stop:
        lengths = range(min(len(string) - 1, len(text)), longest, -1)
        longest = next((length for length in lengths if text.endswith(string[:length])), longest)
    return longest
