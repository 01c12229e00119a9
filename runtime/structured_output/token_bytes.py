"""The bytes of a vocabulary's tokens, and sets of tokens by what they have, a bit a token."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
BLANKS = b" \t\n\r"


class TokenBytes:
    """What each token of a tokenizer of llguidance is written as."""

    def __init__(self, tokenizer: Any, structural: Mapping[str, int]) -> None:
        """structural: ids of structural tokens, by what they are written as."""
        num = tokenizer.vocab_size
        self._num_words = -(-num // 32)
        self.of = [b"" if tokenizer.is_special_token(i) else tokenizer.decode_bytes([i]) for i in range(num)]
        for text, id_ in structural.items():
            self.of[id_] = text.encode()
        self.ids: dict[bytes, int] = {}
        for id_, own in enumerate(self.of):
            self.ids.setdefault(own, id_)
        self.longest = max(map(len, self.of))

    def words_of(self, mask: bytes) -> Words:
        """Returns the bits [words] of a mask, which may be longer than the vocabulary."""
        return np.frombuffer(mask, np.uint32)[: self._num_words]

    def those(self, has: Callable[[bytes], object]) -> Words:
        """Returns the bits [words] of tokens for whose bytes something holds."""
        bits = np.zeros(self._num_words * 32, np.uint8)
        bits[: len(self.of)] = [bool(has(own)) for own in self.of]
        return np.packbits(bits, bitorder="little").view(np.uint32)

    @cached_property
    def blank(self) -> Words:
        return self.those(lambda own: own and not own.strip(BLANKS))

    @cached_property
    def quoting(self) -> Words:
        return self.those(lambda own: b'"' in own)

    @cached_property
    def closing(self) -> Words:
        """Those that may end a string, and an item or a list behind it."""
        return self.those(re.compile(rb'".*[,\]]', re.DOTALL).search)

    @cached_property
    def separating(self) -> Words:
        return self.those(re.compile(rb"[,\]]").search)

    @cached_property
    def repeating(self) -> Words:
        """Those that open a list and end two items of it, or an item and the list."""
        return self.those(re.compile(rb"\[.*,.*[,\]]", re.DOTALL).search)

    @cached_property
    def _first_bytes(self) -> dict[int, Words]:
        return self._by_first([own[:1] for own in self.of])

    @cached_property
    def _first_bytes_but_blanks(self) -> dict[int, Words]:
        return self._by_first([own.lstrip(BLANKS)[:1] for own in self.of])

    def beginning(self, firsts: Iterable[int], *, is_string: bool) -> Words:
        """Returns the bits of tokens that begin with one of these bytes, in strings or after blanks."""
        table = self._first_bytes if is_string else self._first_bytes_but_blanks
        found = np.zeros(self._num_words, np.uint32)
        for first in firsts:
            if first in table:
                found |= table[first]
        return found

    def _by_first(self, firsts: list[bytes]) -> dict[int, Words]:
        codes = np.array([first[0] if first else 256 for first in firsts], np.int16)
        table: dict[int, Words] = {}
        for code in np.unique(codes[codes < 256]).tolist():
            bits = np.zeros(self._num_words * 32, np.uint8)
            bits[: len(codes)] = codes == code
            table[code] = np.packbits(bits, bitorder="little").view(np.uint32)
        return table


def ids_in(words: Words) -> list[int]:
    """Returns the ids whose bits are set."""
    found: list[int] = []
    for word in words.nonzero()[0].tolist():
        bits = int(words[word])
        while bits:
            low = bits & -bits
            found.append(word * 32 + low.bit_length() - 1)
            bits ^= low
    return found
