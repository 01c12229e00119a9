"""Which beginnings of prompts an engine has seen, by hashes of their blocks: a guess at its prefix cache."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import xxhash

MOST_HASHED = 1024  # blocks of a prompt: who has so many of them has the most of it
MOST_KEPT = 65_536  # hashes of an engine


def block_hashes(token_ids: Sequence[int], salt: str, block_size: int) -> list[bytes]:
    """Returns a hash for each full block of the tokens, of it and all before it, and of the salt."""
    width = 4 * block_size
    whole = array("i", token_ids[: MOST_HASHED * block_size]).tobytes()
    digest, hashes = salt.encode(), []
    for end in range(width, len(whole) + 1, width):
        digest = xxhash.xxh3_128_digest(digest + whole[end - width : end])
        hashes.append(digest)
    return hashes


class KnownPrefixes:
    """The beginnings that one engine was given, the least recently given forgotten first."""

    def __init__(self, most: int) -> None:
        """most: hashes that are kept: as many as the engine's cache has blocks, MOST_KEPT at most."""
        self._most = max(1, min(most, MOST_KEPT))
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def match(self, hashes: Sequence[bytes]) -> int:
        """Returns how many blocks, from the first on, it has seen."""
        known = self._hashes
        return next((count for count, each in enumerate(hashes) if each not in known), len(hashes))

    def note(self, hashes: Sequence[bytes]) -> None:
        """Takes in the blocks of a prompt; of one that is too long the beginning stays."""
        known = self._hashes
        for each in reversed(hashes):  # the first is forgotten last, as none is of use without it
            known[each] = None
            known.move_to_end(each)
        while len(known) > self._most:
            known.popitem(last=False)
