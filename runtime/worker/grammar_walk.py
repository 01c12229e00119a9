"""A request's matcher, moved along its output: which token comes next, or for certain, by its grammar."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..structured_output.compiler import error_of

Newest = Callable[[int], Sequence[int]]  # so many of the newest tokens -> them


class GrammarWalk:
    """Where a request stands in its grammar, by the position of the next token in the output.

    A run of tokens that the grammar forces is settled where it begins, as the tokenizer writes it: every
    position in it has that one token, be it sampled or taken without a sample. So both come to the same, and
    a constant however long is looked at once.

    Whatever interrupts a call, as Ctrl-C at any line, is followed by the matcher reading its tokens anew.
    """

    def __init__(self, matcher: Any, *, lexer: int = 0) -> None:
        """matcher: of llguidance, at the beginning of an answer. lexer: which it shares with others."""
        self.matcher, self.lexer = matcher, lexer
        self.mask_seconds = 0.0  # that the last mask took
        self._seen: list[int] = []  # tokens of the output that the matcher has, those of the run included
        self._is_whole = True  # the matcher has them, and the run is that of where it stands
        self._start = 0  # where the run begins
        self._run: tuple[int, ...] = ()
        self._drafts: tuple[int, ...] = ()  # that were looked at from where it stood, and may hold
        self._find_run(0)

    def move(self, position: int, newest: Newest) -> bool:
        """Stand before the token of that position; False where a token before it is broken.

        newest: asked for those of the last tokens before it that are not known.
        """
        if not self._is_whole:
            self._mend()
        elif position == self._start or self.token_at(position) is not None:
            return True
        tokens: Sequence[int] = ()
        missing = position - len(self._seen)
        if missing > 0 and not self.matcher.is_stopped():
            held = self._drafts[: missing - 1]
            tokens = (*held, *newest(missing - len(held)))
            if min(tokens) < 0:
                return False  # its request ends by what was wrong there
        self._is_whole = False
        if missing < 0:
            del self._seen[position:]
            self.matcher.rollback(-missing)
        self._drafts = ()
        self._consume(tokens)
        self._find_run(position)
        self._is_whole = True
        return True

    def before(self, position: int) -> Sequence[int]:
        """The tokens before a position, up to which it has moved."""
        return self._seen[:position]

    def has_seen(self, position: int) -> bool:
        """Whether the matcher was given the token of that position."""
        return self._is_whole and position < len(self._seen)

    def token_at(self, position: int) -> int | None:
        """The only token that the grammar leaves there, None where it leaves several or is not there."""
        place = position - self._start
        return self._run[place] if 0 <= place < len(self._run) else None

    def forced_after(self, position: int, token: int) -> tuple[int, ...]:
        """The tokens that follow for certain the one that was sampled for a position."""
        if not self._is_whole:
            return ()
        if position >= len(self._seen) and token >= 0:
            self.move(position + 1, partial(_these, (token,)))
        place = position + 1 - self._start
        return self._run[place:] if place >= 0 else ()

    def look_at(
        self, position: int, drafts: Sequence[int], masks: NDArray[np.int32]
    ) -> tuple[int, str] | None:
        """Write the masks [1 + drafts, words] of that position and those after each of the drafts.

        Masks that come after a draft that the grammar leaves out stay as they are. It stands where it stood.
        Returns after how many drafts the matcher cannot go on, and why, where that is after any: then it is
        to go on by another().
        """
        for place, draft in enumerate((*drafts, None)):
            self.write_mask(position + place, masks[place])
            if place and self.matcher.is_error():
                return place, error_of(self.matcher)
            if draft is None or not _allows(masks[place], draft):
                break
            self.move(position + place + 1, partial(_these, (draft,)))
        self._return_to(position, drafts)
        return None

    def another(self, matcher: Any, position: int, drafts: Sequence[int]) -> None:
        """Stand there by a matcher at the beginning, before drafts that the one before could not follow."""
        self.matcher = matcher
        del self._seen[position:]
        self._is_whole = False
        self._return_to(position, drafts)

    def write_mask(self, position: int, mask: NDArray[np.int32]) -> None:
        """Write the mask [words] of the position where it stands, a bit an id."""
        token = self.token_at(position)
        if token is None:
            self.time_mask(mask)
        else:
            mask[:] = 0
            mask.view(np.uint32)[token // 32] = 1 << token % 32

    def time_mask(self, mask: NDArray[np.int32]) -> None:
        """Write the mask [words] of where it stands, no token being certain, and keep what that took."""
        started = time.perf_counter()
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.mask_seconds = time.perf_counter() - started

    def _return_to(self, position: int, drafts: Sequence[int]) -> None:
        self.move(position, partial(_these, ()))
        self._drafts = tuple(drafts[max(0, len(self._seen) - position) :])

    def _find_run(self, position: int) -> None:
        """Settle what comes from here for certain, and the end after it where nothing else can."""
        tokens = self.matcher.compute_ff_tokens()
        if tokens:
            self._seen += tokens
            self.matcher.consume_tokens(tokens)  # many at once: a constant may be long
        if self.matcher.is_stopped() and not self.matcher.is_error():
            ends = np.unpackbits(np.frombuffer(self.matcher.compute_bitmask(), np.uint8), bitorder="little")
            ids = ends.nonzero()[0].tolist()
            tokens += ids if len(ids) == 1 else []
        self._start, self._run = position, tuple(tokens)

    def _consume(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self.matcher.is_stopped():  # which takes an end as well, and does not count it
                break
            self._seen.append(token)
            self.matcher.consume_token(token)

    def _mend(self) -> None:
        """Have the matcher read what it may or may not have seen, and know of no run."""
        self.matcher.reset()
        self.matcher.consume_tokens(self._seen)
        self._start, self._run, self._drafts = -1, (), ()


def _these(tokens: Sequence[int], count: int) -> Sequence[int]:
    assert count == len(tokens), f"{count} tokens are missed where {len(tokens)} are known"
    return tokens


def _allows(mask: NDArray[np.int32], token: int) -> bool:
    """Whether a mask [words] has the bit of an id, which may be none of the vocabulary."""
    word, bit = divmod(token, 32)
    return 0 <= word < len(mask) and bool(int(mask[word]) >> bit & 1)
