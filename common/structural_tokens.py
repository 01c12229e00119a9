"""Structural tokens: added tokens that models write as one token, as <tool_call>, which is no text then."""

import re
from collections.abc import Mapping
from functools import cached_property

# Some are text, which a string may hold: tags of HTML, as Gemma's <td>, bytes, and what has no name.
NAMED = re.compile(r"<[^<>\s]*\w[^<>\s]*>|\[/?[A-Z][A-Z0-9_]*\]")
TEXT = re.compile(
    r"<0x[0-9A-F]{2}>|</?(?:a|abbr|address|article|aside|audio|b|bbox|big|blockquote|body|br|button|canvas|caption|center"
    r"|cite|code|col|colgroup|dd|del|details|dfn|div|dl|dt|em|fieldset|figcaption|figure|font|footer|form"
    r"|h[1-6]|head|header|hr|html|i|iframe|img|input|ins|kbd|label|legend|li|link|main|mark|meta|nav|ol"
    r"|optgroup|option|p|pre|q|s|samp|script|section|select|small|span|strike|strong|style|sub|sup|svg"
    r"|table|tbody|td|textarea|tfoot|th|thead|title|tr|tt|u|ul|var|video)/?>"
)
MAX_KEPT = 256  # texts, whose pieces are known


def is_structural(text: str, *, is_special: bool) -> bool:
    """Whether an added token that is written so stands for structure, and is no text: special ones always."""
    return is_special or (NAMED.fullmatch(text) is not None and TEXT.fullmatch(text) is None)


class StructuralTokens:
    """The structural tokens of a tokenizer, by what they are written as."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = {text: token_id for text, token_id in ids.items() if text}
        self._pieces: dict[str, tuple[str | int, ...]] = {}

    @cached_property
    def names(self) -> dict[int, str]:
        """What each is written as, by id."""
        return {token_id: text for text, token_id in self.ids.items()}

    def below(self, num_ids: int) -> "StructuralTokens":
        """Returns those with ids below a number; itself where that is all of them."""
        if all(token_id < num_ids for token_id in self.ids.values()):
            return self
        return StructuralTokens({text: token_id for text, token_id in self.ids.items() if token_id < num_ids})

    def pieces(self, text: str) -> tuple[str | int, ...]:
        """Returns a text cut at its structural tokens, the longest first: ids, and the texts between."""
        found = self._pieces.get(text)
        if found is None:
            there = (own for own in self.ids if own in text)  # a tokenizer may have thousands
            longest_first = sorted(there, key=lambda own: (-len(own), own))
            cut = re.split(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})", text)
            found = tuple(self.ids[piece] if at % 2 else piece for at, piece in enumerate(cut) if piece)
            if len(self._pieces) < MAX_KEPT:
                self._pieces[text] = found
        return found


NO_TOKENS = StructuralTokens({})
