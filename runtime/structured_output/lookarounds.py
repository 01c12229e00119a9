"""Patterns that look ahead at their beginning as patterns that all are to match, none of which looks ahead.

What may not follow is literal, or characters of classes one by one: (?!aws:), (?!(a|b)$), (?![Ii][Oo]).
"""

import re
from collections.abc import Iterator
from typing import Any

from .open_names import escaped, without

LOOKS = re.compile(r"(?<!\\)(?:\\\\)*\(\?(?:[=!]|<[=!])")
CLASS = r"\[\^?(?:\\[^wdsWDSpPbB]|[^\]\\\[])+\]"
CHARACTER = re.compile(rf"(\\[^A-Za-z0-9\n]|{CLASS}|[^\\\[\](){{}}|.*+?^$])(?:\{{(\d)\}})?")
GROUP = re.compile(r"\((?:\?:)?([^()]*)\)(\$|\.\*\$?|)")
PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
OUTSIDE = re.compile(r"\|(?![^\[]*\])")  # of classes
TAIL = re.compile(r"(?:\.\*)?\$?$")
BLANK = re.compile(r"\\s\*\$")
NOT_BLANK = r"[^\s\x1c-\x1f\x85\ufeff]"  # by whatever is a blank to JavaScript, Python or Rust
MOST = 16  # looks ahead of one pattern
ANYTHING = r"[\s\S]*"
Sequence = list[str]  # of what each matches one character


def without_lookarounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a string's schema with such patterns in place of one that looks ahead, if they are known."""
    pattern = schema.get("pattern")
    if not isinstance(pattern, str) or not LOOKS.search(pattern):
        return schema
    parts = _parts(pattern)
    if parts is None:
        return schema
    others = schema.get("allOf")
    held: list[Any] = others if isinstance(others, list) else []
    first, *more = parts
    return {**schema, "pattern": first, "allOf": [*held, *({"pattern": each} for each in more)]}


def texts_without(pattern: str) -> str | None:
    """Returns a pattern of texts that the given one does not match; None where it is not known."""
    return _complement(pattern[1:]) if pattern.startswith("^") and not LOOKS.search(pattern) else None


def _parts(pattern: str) -> list[str] | None:
    """Returns patterns that match together what one with looks ahead matches; None where it is not known."""
    if not pattern.startswith("^"):
        return None
    rest = pattern[1:]
    found: list[str] = []
    while rest.startswith(("(?=", "(?!")) and len(found) <= MOST:
        end = _end_of_group(rest)
        body = rest[3 : end - 1]
        part = _ahead(body) if rest[2] == "=" else _complement(body)
        if part is None:
            return None
        found.append(part)
        rest = rest[end:]
    return None if len(found) > MOST or LOOKS.search(rest) or _has_ways(rest) else [f"^{rest}", *found]


def _pieces(text: str) -> Iterator[tuple[str, int, int]]:
    """Yields each piece of a pattern, where it ends, and in how many groups that is."""
    depth = 0
    for piece in PIECE.finditer(text):
        depth += {"(": 1, ")": -1}.get(piece[0], 0)
        yield piece[0], piece.end(), depth


def _end_of_group(text: str) -> int:
    """Returns where the group ends that a text begins with; the text's own end where it does not."""
    return next((end for _, end, depth in _pieces(text) if depth == 0), len(text))


def _has_ways(text: str) -> bool:
    return any(piece == "|" and depth == 0 for piece, _, depth in _pieces(text))


def _ahead(body: str) -> str | None:
    inner = body.removeprefix("^").removesuffix("$")
    has_ends = re.search(r"(?<!\[)(?<!\\)[\^$]", inner) or inner.endswith("\\")
    if LOOKS.search(inner) or has_ends or "|" in inner:
        return None
    return f"^{inner}$" if body.endswith("$") else f"^{inner}"


def _complement(body: str) -> str | None:
    """Returns a pattern of texts at whose beginning this does not match."""
    if BLANK.fullmatch(body):
        return NOT_BLANK
    grouped = GROUP.fullmatch(body)
    inner, tail = (grouped[1], grouped[2]) if grouped else (body, "")
    sequences = [_sequence(each.removeprefix("^") + tail) for each in OUTSIDE.split(inner)]
    names: list[str] = []
    beginnings: list[str] = []
    for known in sequences:
        if known is None:
            return None
        sequence, is_whole = known
        texts = [_literal(each) for each in sequence]
        if None in texts:
            return _other(sequence, is_whole) if len(sequences) == 1 else None
        text = "".join(map(str, texts))
        (names if is_whole else beginnings).append(text)
    return without([*names, *(f"{name}\n" for name in names)], beginnings) if all(beginnings) else None


def _sequence(text: str) -> tuple[Sequence, bool] | None:
    """Returns what a text of a pattern matches, one character after another, and whether its end follows."""
    place, found = 0, []
    while piece := CHARACTER.match(text, place):
        found += [piece[1]] * int(piece[2] or 1)
        place = piece.end()
    rest = text[place:]
    if not found or not TAIL.fullmatch(rest):
        return None
    return found, rest == "$"


def _literal(piece: str) -> str | None:
    if piece.startswith("["):
        return None
    return piece[-1]


def _other(sequence: Sequence, is_whole: bool) -> str:
    return f"^(?:{'|'.join(_ways(sequence, is_whole))})$"


def _ways(sequence: Sequence, is_whole: bool) -> Iterator[str]:
    """Yields what may follow, so that these characters do not."""
    if not sequence:
        yield rf"[^\n]{ANYTHING}|\n[\s\S]+"  # beside the end, before which some take a line's as well
        return
    first, *more = sequence
    yield ""
    yield f"{_opposite(first)}{ANYTHING}"
    if more or is_whole:
        yield f"{first}(?:{'|'.join(_ways(more, is_whole))})"


def _opposite(piece: str) -> str:
    if not piece.startswith("["):
        return f"[^{escaped(piece[-1])}]"
    return f"[{piece[2:]}" if piece.startswith("[^") else f"[^{piece[1:]}"
