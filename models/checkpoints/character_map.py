"""The map of characters that SentencePiece's files carry: whether the tokenizers library can follow it."""

import base64
import json

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from ...common.errors import LoadError

Units = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int64]

BYTES = np.arange(1, 256)  # of a key; none holds a NUL
LEAF, WIDE = 1 << 8, 1 << 9  # bits of a unit: a value follows; its offset counts in 256
LABEL = (1 << 31) | 0xFF
VALUE = (1 << 31) - 1


def check_character_map(content: bytes, origin: object) -> None:
    """LoadError where following the map would leave it: the library panics there, at some later text.

    It is a double-array trie of UTF-8 keys (https://github.com/s-yata/darts-clone) behind its size in bytes,
    then the texts that its values point into, each ended by a NUL.
    """
    size = int.from_bytes(content[:4], "little")
    if size % 4 or not 0 < size <= len(content) - 4:
        raise _damaged(origin, f"its trie has {size} bytes of {len(content)}")
    texts = content[4 + size :]
    try:
        texts.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _damaged(origin, str(error)) from error
    for place in _values(np.frombuffer(content, "<u4", size // 4, 4), origin):
        if place >= len(texts) or texts[place] & 0xC0 == 0x80 or texts.find(0, place) < 0:
            raise _damaged(origin, f"a key has its text at byte {place} of {len(texts)}")


def check_normalizer(tokenizer: Tokenizer, origin: object) -> None:
    """The same for every map in a tokenizer's normalizer."""
    if tokenizer.normalizer is None:
        return
    state = json.loads(tokenizer.normalizer.__getstate__())
    for step in state.get("normalizers", [state]):
        if step.get("type") == "Precompiled":
            check_character_map(base64.b64decode(step["precompiled_charsmap"]), origin)


def _values(units: Units, origin: object) -> list[int]:
    """Values of all keys: level by level from the root, each place once."""
    seen = np.zeros(len(units), dtype=bool)
    values: set[int] = set()
    bases = _below(units, np.zeros(1, np.int64))
    while len(bases):
        children = (bases[:, None] ^ BYTES).ravel()
        _require_inside(units, children, origin)
        labels = np.tile(BYTES, len(bases))
        children = np.unique(children[(units[children] & LABEL) == labels])
        children = children[~seen[children]]
        seen[children] = True
        bases = _below(units, children)
        ends = bases[(units[children] & LEAF) != 0]
        _require_inside(units, ends, origin)
        values.update((units[ends] & VALUE).tolist())
    return sorted(values)


def _below(units: Units, places: Places) -> Places:
    """Where the children of these units are, to be crossed with their bytes."""
    found = units[places].astype(np.int64)
    return places ^ ((found >> 10) << np.where(found & WIDE, 8, 0))


def _require_inside(units: Units, places: Places, origin: object) -> None:
    if len(places) and int(places.max()) >= len(units):
        raise _damaged(origin, f"a key leads to unit {int(places.max())} of {len(units)}")


def _damaged(origin: object, why: str) -> LoadError:
    return LoadError(f"{origin}: precompiled_charsmap is damaged: {why}; download it again")
