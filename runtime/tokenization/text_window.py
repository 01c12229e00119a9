"""The last few tokens of a text, decoded together: what one more token adds, and what is still uncertain."""

import codecs
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Protocol

from .plain_tokens import REPLACEMENT, PlainToken

WINDOW = 8  # tokens decoded at a time, a few more while a character is incomplete
KEPT = 4  # of them, when there are more
MOST_PENDING = 3  # bytes of a character that is incomplete


class Decoder(Protocol):
    """What a window asks of a tokenizer."""

    @property
    def special_tokens(self) -> Mapping[int, str]: ...
    @property
    def byte_token_ids(self) -> Mapping[int, int]: ...
    @property
    def plain_tokens(self) -> Mapping[int, PlainToken | None]: ...
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class TextWindow:
    """The last tokens of a text, as far as the next one's text depends on them: by spaces, split characters.

    The first tokens serve only as that context: a tokenizer may strip the space that begins a text, so a
    window must begin with a token that has text of its own to lose it from. is_settled: whether the last
    token made everything before it certain; else its text goes on what is uncertain.
    """

    __slots__ = (
        *("is_settled", "_tokenizer", "_bytes", "_plain", "_hidden", "_skip_special_tokens", "_ids"),
        *("_num_certain", "_uncertain", "_run", "_of_prompt"),
    )

    def __init__(self, tokenizer: Decoder, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self.is_settled = True
        self._tokenizer = tokenizer
        self._bytes = tokenizer.byte_token_ids
        self._plain = tokenizer.plain_tokens
        self._hidden = tokenizer.special_tokens if skip_special_tokens else {}
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._num_certain = 0  # characters of the window that no later token changes
        self._uncertain = ""  # those after them
        self._run: _ByteRun | None = None
        self._of_prompt = ""  # of the uncertain text, what belongs to the prompt if nothing completes it
        self._begin(prompt)

    def take_plain(self, token_id: int, but: frozenset[str]) -> str | None:
        """Takes a token whose text is the same wherever it stands, where all before it is certain.

        Returns the text, which is certain, and all the context that the next one needs. None: the token is
        another, or its text has one of the characters of `but`; it was not taken.
        """
        if not self._num_certain or self._uncertain or self._of_prompt or self._run is not None:
            return None
        token = self._plain[token_id]
        if token is None or (but and not but.isdisjoint(token.text)):
            return None
        text, self._ids, self._num_certain = token
        self.is_settled = True
        return text

    def append(self, token_id: int) -> tuple[str, str]:
        """Takes a token; returns the text it makes certain, and the uncertain text after that."""
        if token_id in self._hidden:
            self.is_settled = self._run is None or self._run.is_spoiled
            return "", self._shown()
        if token_id in self._bytes:
            return self._append_byte(token_id)
        ids, num_certain, run = self._ids, self._num_certain, self._run
        if run is not None:
            ids = [run.last_id]
            num_certain = len(self._decode(ids))
        text = self._decode([*ids, token_id])
        if run is not None and len(text) == num_certain:  # a token without text does not end a run
            return "", ""
        self.is_settled, self._run = True, None
        ended = "" if run is None else self._less_prompt(run.final())
        return ended + self._settle(ids, token_id, text, num_certain), self._shown()

    def finish(self) -> str:
        """Returns the uncertain text, when no more tokens come."""
        rest = self._shown() if self._run is None else self._less_prompt(self._run.final())
        self._uncertain, self._run = "", None
        return rest

    def _begin(self, prompt: Sequence[int]) -> None:
        """Takes the end of the prompt as context."""
        shown = (token_id for token_id in reversed(prompt) if token_id not in self._hidden)
        run, context = [], []
        for token_id in shown:
            if token_id not in self._bytes:
                context = [token_id, *islice(shown, WINDOW - 1)]
                break
            run.append(token_id)
        text = self._decode(context[::-1])
        if not text:
            context += shown
            text = self._decode(context[::-1])
        self._ids, self._of_prompt = context[::-1], text[len(text) - self._num_pending(text) :]
        self._num_certain, self._uncertain = len(text) - len(self._of_prompt), self._of_prompt
        for token_id in reversed(run):
            self._append_byte(token_id)
        if self._run is not None:
            self._of_prompt = self._run.final()

    def _append_byte(self, token_id: int) -> tuple[str, str]:
        if self._run is None:
            self._run = _ByteRun(self._decode([*self._ids, token_id])[self._num_certain :])
        was_spoiled = self._run.is_spoiled
        added = self._run.append(token_id, self._bytes[token_id])
        self.is_settled = self._run.is_spoiled
        if not self.is_settled:
            return "", added
        return added if was_spoiled else self._less_prompt(added), ""

    def _settle(self, ids: list[int], token_id: int, text: str, num_certain: int) -> str:
        """Moves on to a text with one more token; returns what of it is certain."""
        new = text[num_certain:]
        if num_certain and new == self._uncertain and not self._decode([token_id]):
            return ""  # a token without text, here and later
        self._ids = [*ids, token_id]
        if new != self._of_prompt:
            num_certain += len(new) - len(new := self._less_prompt(new))
        pending = self._num_pending(new)
        certain, self._uncertain = new[: len(new) - pending], new[len(new) - pending :]
        self._num_certain = num_certain + len(certain)
        if len(self._ids) > WINDOW:
            self._trim(text)
        return certain

    def _trim(self, text: str) -> None:
        """Drops the first tokens, unless this decoder needs its context from further back.

        A character that is cut apart leaves up to three others in front.
        """
        ids = self._ids[-KEPT:]
        shown = self._decode(ids)
        num_uncertain = len(text) - self._num_certain
        for garbled in range(min(MOST_PENDING + 1, len(shown) - num_uncertain)):
            if text.endswith(shown[garbled:]):
                self._ids, self._num_certain = ids, len(shown) - num_uncertain
                return

    def _shown(self) -> str:
        return "" if self._of_prompt or self._run is not None else self._uncertain

    def _less_prompt(self, text: str) -> str:
        """Returns a text less what the prompt had of it, once; all of it where the answer changed that."""
        before, self._of_prompt = self._of_prompt, ""
        return text.removeprefix(before)

    def _num_pending(self, text: str) -> int:
        """Returns how many characters at the end may be bytes that are still to be completed."""
        if self._bytes:
            return 0
        return min(MOST_PENDING, len(text) - len(text.rstrip(REPLACEMENT)))

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class _ByteRun:
    """Tokens of one byte each, as SentencePiece has them: their text if all are UTF-8, else � for each."""

    def __init__(self, first: str) -> None:
        self.is_spoiled = False
        self.last_id = -1
        self._first = first  # the first character in its context, where it is one byte
        self._count = 0
        self._characters: list[str] = []
        self._utf8 = codecs.getincrementaldecoder("utf-8")()

    def append(self, token_id: int, byte: int) -> str:
        """Takes a byte; returns the text it adds, that of the whole run where this byte spoils it."""
        self.last_id, self._count = token_id, self._count + 1
        if self.is_spoiled:
            return REPLACEMENT
        try:
            added = self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            self.is_spoiled = True
            return REPLACEMENT * self._count
        if added and self._count == 1:
            added = self._first
        self._characters.append(added)
        return added

    def final(self) -> str:
        """Returns the text of the run if it ends here, less what was certain before."""
        if self.is_spoiled:
            return ""
        return REPLACEMENT * self._count if self._utf8.getstate()[0] else "".join(self._characters)
