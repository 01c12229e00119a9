r"""Patterns of strings, as llguidance matches them in the quotes of JSON.

A class of characters that has all control characters but not the quote, or not the backslash, lets that
through by its escape all the same: [^"] matches \". Without one of the control characters it does not.
"""

import re

PIECE = re.compile(r"\\[pP]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|$)|[^\\\[]++|.", re.DOTALL)
CONTROL = re.compile(r"\\x[01]|\\u00[01]|\\u\{0*1?[0-9a-fA-F]\}|\\c|\\0|[\x00-\x1f]|\\P")
IN_CLASS = re.compile(r"\\.|\[|&(?=&)|~(?=~)", re.DOTALL)  # what would open a class in a class, or join two
LEFT_OUT = r"\x1f"
SURROGATE = r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}"  # a half of a character, which no text has
SURROGATES = re.compile(rf"(-)?{SURROGATE}(?:-{SURROGATE}|(-)(?=[^\]]))?")


def quotable(pattern: str) -> str:
    r"""Returns a pattern that matches the same texts in quotes as out of them, less those with U+001F."""
    return "".join(map(_quotable, PIECE.findall(pattern)))


def _quotable(piece: str) -> str:
    if piece.startswith("\\P{"):
        return f"[^{LEFT_OUT}\\p{piece[2:]}]"
    if not piece.startswith("[") or len(piece) < 3 or piece.startswith("[^]"):
        return piece
    piece = SURROGATES.sub(_beside, piece)
    if piece in ("[]", "[^]"):
        return r"[^\s\S]" if piece == "[]" else r"[^\x1f]"
    body = IN_CLASS.sub(lambda found: found[0] if len(found[0]) > 1 else f"\\{found[0]}", piece[1:-1])
    if body.startswith("^"):
        return f"[^{LEFT_OUT}{body[1:]}]"
    return f"[[{body}]&&[^{LEFT_OUT}]]" if CONTROL.search(body) else f"[{body}]"


def _beside(found: re.Match[str]) -> str:
    """Returns what is left of a range of a class that begins or ends among the halves of characters."""
    if found[1]:
        return r"-\ud7ff"
    return r"\ue000-" if found[2] else ""
