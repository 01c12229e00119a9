"""Tokens whose text is the same wherever they stand, which most are: decoded once, then looked up."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tokenizers.decoders import Decoder as Joiner

REPLACEMENT = "\ufffd"
SPACES = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
FIRST_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
SENTENCEPIECE = (SPACES, {"type": "ByteFallback"}, {"type": "Fuse"})


class PlainToken(NamedTuple):
    """A token that adds the same text behind any text that is whole."""

    text: str
    ids: list[int]  # itself, as the context of what follows it
    num_alone: int  # characters of its text where nothing stands before it


class Decoder(Protocol):
    """What plain tokens are made of."""

    @property
    def special_tokens(self) -> Mapping[int, str]: ...
    @property
    def byte_token_ids(self) -> Mapping[int, int]: ...
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def text_of(self, token_id: int) -> str: ...


class PlainTokens(dict[int, PlainToken | None]):
    """plain_tokens[token_id]: the plain token of an id, None for one whose text depends on its neighbours."""

    def __init__(self, tokenizer: Decoder, joiner: Any) -> None:
        """joiner: the tokenizers library's decoder that joins tokens; by an unknown one no token is plain."""
        self._tokenizer = tokenizer
        self._is_known = only_joins(joiner)

    def __missing__(self, token_id: int) -> PlainToken | None:
        found = self[token_id] = self._made(token_id) if self._is_known else None
        return found

    def _made(self, token_id: int) -> PlainToken | None:
        tokenizer = self._tokenizer
        if token_id in tokenizer.special_tokens or token_id in tokenizer.byte_token_ids:
            return None
        text = tokenizer.text_of(token_id)
        if not text or REPLACEMENT in text:  # none, or bytes of a character that others complete
            return None
        return PlainToken(text, [token_id], len(tokenizer.decode([token_id])))


def only_joins(joiner: Any) -> bool:
    """Whether a decoder puts texts of tokens side by side, but for bytes and the first space of all."""
    if not isinstance(joiner, Joiner):
        return False
    state = json.loads(joiner.__getstate__())
    steps = state.get("decoders", [state])
    is_bytes = len(steps) == 1 and steps[0].get("type") == "ByteLevel"
    return is_bytes or steps in ([*SENTENCEPIECE], [*SENTENCEPIECE, FIRST_SPACE])
