"""A matcher of llguidance's that leaves out the tokens by which an item of a list would come twice.

Of a grammar with uniqueItems the matcher knows all but that; what the lists have is followed beside it. A
token is left out that ends an item like one before, and one after which every way to go on comes to that.
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .item_tracker import ItemTracker, Standing
from .token_bytes import TokenBytes, Words, ids_in

ENDS = b",]"  # of items
SAME_NUMBER = b".0"  # what a number may go on with that stays what it is
MOST_ALIKE = 200  # items that begin as what is written, and are looked at
MOST_LOOKS = 400  # places that are looked at for a mask in all; where that is not enough tokens are allowed


class UniqueItemsMatcher:
    """What a matcher of llguidance is, of which it has as many of the methods as are called here."""

    def __init__(self, matcher: Any, tokens: TokenBytes, tracker: ItemTracker) -> None:
        """matcher: at the beginning of an answer."""
        self._matcher, self._tokens, self._tracker = matcher, tokens, tracker
        self._standings: list[Standing | None] = [tracker.first]  # by tokens; none after an item came twice
        self._looks = 0  # that are left for the mask that is made
        self._known: dict[tuple[int, bytes, bool], bool] = {}  # places of it: whether nothing can come

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def deep_copy(self) -> "UniqueItemsMatcher":
        found = UniqueItemsMatcher(self._matcher.deep_copy(), self._tokens, self._tracker)
        found._standings = [*self._standings]
        return found

    def reset(self) -> None:
        self._matcher.reset()
        del self._standings[1:]

    def rollback(self, num_tokens: int) -> bool:
        del self._standings[len(self._standings) - num_tokens :]
        return bool(self._matcher.rollback(num_tokens))

    def consume_token(self, token_id: int) -> bool:
        return self.consume_tokens([token_id])

    def consume_tokens(self, token_ids: Sequence[int]) -> bool:
        for token_id in token_ids:
            self._standings.append(self._after(self._standings[-1], token_id))
        return bool(self._matcher.consume_tokens(token_ids))

    def try_consume_tokens(self, token_ids: Sequence[int]) -> int:
        """Consumes tokens as long as they are allowed; returns how many were."""
        for number, token_id in enumerate(token_ids):
            mask = np.frombuffer(self.compute_bitmask(), np.uint32)
            if not mask[token_id // 32] >> (token_id % 32) & 1:
                return number
            self.consume_token(token_id)
        return len(token_ids)

    def compute_ff_tokens(self) -> list[int]:
        """Returns the tokens that the grammar leaves alone, up to one after which an item came twice."""
        found: list[int] = []
        standing = self._standings[-1]
        for token_id in self._matcher.compute_ff_tokens():
            standing = self._after(standing, token_id)
            if standing is None:
                break
            found.append(token_id)
        return found

    def compute_bitmask(self) -> bytes:
        mask = self._tokens.words_of(self._matcher.compute_bitmask()).copy()
        self._restrict(mask)
        return mask.tobytes()

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
        mask = np.ctypeslib.as_array((ctypes.c_uint32 * (num_bytes // 4)).from_address(address))
        self._restrict(mask)

    def _after(self, standing: Standing | None, token_id: int) -> Standing | None:
        written = self._tokens.of[token_id] if 0 <= token_id < len(self._tokens.of) else b""
        return None if standing is None else self._tracker.advanced(standing, written)

    def _restrict(self, mask: Words) -> None:
        """Clears the bits of tokens that are left out."""
        standing = self._standings[-1]
        if standing is None:
            mask[:] = 0
            return
        if self._matcher.is_stopped():
            return
        self._looks, self._known = MOST_LOOKS, {}
        for token_id in self._candidates(mask, standing):
            after = self._after(standing, token_id)
            if after is None or self._is_stuck(self._matcher, token_id, after):
                mask[token_id // 32] &= ~np.uint32(1 << token_id % 32)

    def _candidates(self, mask: Words, standing: Standing) -> Iterator[int]:
        """Yields the allowed tokens that may end an item, or begin as one did before."""
        tokens = self._tokens
        if standing.before is not None:
            yield from ids_in(mask & tokens.separating)
        elif not standing.held.is_within:
            yield from ids_in(mask & tokens.repeating)
        elif standing.is_string:
            is_alike = any(used.following(text) for used, text in standing.open_items())
            is_alike = is_alike or b"\\" in standing.text[standing.string_start :]
            yield from ids_in(mask & (tokens.quoting if is_alike else tokens.closing))
            if standing.is_name() or not standing.held.inner().has_free_texts:
                yield from (id_ for id_ in self._same(standing) if mask[id_ // 32] >> (id_ % 32) & 1)
        elif any(used.following(text) or used.has_number(text) for used, text in standing.open_items()):
            yield from ids_in(mask & ~tokens.blank)
        else:
            yield from ids_in(mask & tokens.separating)

    def _same(self, standing: Standing) -> set[int]:
        """Returns the tokens within a string by which an item goes on as one before."""
        found: set[int] = set()
        ids, longest = self._tokens.ids, self._tokens.longest
        for used, text in standing.open_items():
            for other in used.following(text)[:MOST_ALIKE]:
                rest = other[len(text) : len(text) + longest].partition(b'"')[0]
                found.update(ids[rest[:end]] for end in range(1, len(rest) + 1) if rest[:end] in ids)
        return found

    def _is_stuck(self, matcher: Any, token_id: int, after: Standing) -> bool:
        """Whether every way to go on after a token ends an item like one before."""
        place = after.held.number, after.text, after.is_string
        if place not in self._known:
            self._known[place] = self._looked_at(matcher, token_id, after)
        return self._known[place]

    def _looked_at(self, matcher: Any, token_id: int, after: Standing) -> bool:
        nexts: set[int] = set()
        is_open = False
        for used, text in after.open_items():
            others = used.following(text)
            is_number = used.has_number(text)
            is_open = is_open or bool(others) or is_number
            nexts.update(SAME_NUMBER if is_number else b"")
            nexts.update(other[len(text)] for other in others if len(other) > len(text))
        self._looks -= is_open
        if not is_open or self._looks < 0:
            return False
        ahead = matcher.deep_copy()
        ahead.consume_token(token_id)
        mask = self._tokens.words_of(ahead.compute_bitmask())
        nexts.update(ENDS)
        tokens, is_string = self._tokens, after.is_string
        left = mask & ~tokens.beginning(nexts, is_string=is_string)
        if (left if is_string else left & ~tokens.blank).any():
            return False
        return all(self._is_stuck_by(ahead, mask, after, byte) for byte in sorted(nexts))

    def _is_stuck_by(self, ahead: Any, mask: Words, standing: Standing, byte: int) -> bool:
        """The same of ways that go on with a byte."""
        token_id = self._tokens.ids.get(bytes([byte]))
        if token_id is not None and mask[token_id // 32] >> (token_id % 32) & 1:
            return self._is_stuck_after(ahead, token_id, standing)
        ways = ids_in(mask & self._tokens.beginning([byte], is_string=standing.is_string))
        return all(self._is_stuck_after(ahead, way, standing) for way in ways)  # where bytes are forced

    def _is_stuck_after(self, ahead: Any, token_id: int, standing: Standing) -> bool:
        after = self._after(standing, token_id)
        return after is None or self._is_stuck(ahead, token_id, after)
