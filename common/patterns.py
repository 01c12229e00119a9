"""Regular expressions of others, matched within bounded work: Python's own may backtrack for years, and hold
up every thread meanwhile."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from re import _constants, _parser  # type: ignore[attr-defined]  # which typeshed leaves out
from typing import Any

MOST_STEPS = 300_000  # about half a second
MOST_SHARED_STEPS = 2_000_000
PLAIN_TEXT, PLAIN_REPEATS = 100, 2  # a text so short and so few repeats: a hundred thousand ways at most
_allowance: ContextVar[list[int] | None] = ContextVar("allowance of patterns", default=None)
REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
WIDE = ("BRANCH", *REPEATS)


class PatternError(re.error):
    """An expression that takes too long, or has what is not matched within bounded work."""


@contextmanager
def shared_steps() -> Iterator[None]:
    """Within, all expressions together may take as many steps as a few of the hardest."""
    token = _allowance.set([MOST_SHARED_STEPS])
    try:
        yield
    finally:
        _allowance.reset(token)


def searches(pattern: str, text: str) -> bool:
    """Whether it matches anywhere in a text, as re.search; re.error for what is none, PatternError too."""
    tree = _tree(pattern)
    if _is_plain(pattern) and len(text) <= PLAIN_TEXT:
        return re.search(pattern, text) is not None
    return bool(_Run(text, tree).sequence(tree, range(len(text) + 1)))


def matches(pattern: str, text: str) -> bool:
    """Whether it matches a beginning of a text, as re.match; errors as searches()."""
    return searches(rf"\A(?:{pattern})", text)


def matches_whole(pattern: str, text: str) -> bool:
    """Whether it matches all of a text, as re.fullmatch; errors as searches()."""
    return searches(rf"\A(?:{pattern})\Z", text)


@lru_cache(maxsize=256)
def _tree(pattern: str) -> Any:
    try:
        re.compile(pattern)  # what parses and is still no expression, as a lookbehind of no width
        return _parser.parse(pattern)
    except (RecursionError, OverflowError) as error:
        raise PatternError("it is nested too deep, or repeats too often") from error


@lru_cache(maxsize=256)
def _is_plain(pattern: str) -> bool:
    """Whether nothing that has several ways is repeated, and little is at all."""
    repeats = [item for item in _inside(_tree(pattern)) if str(item[0]) in WIDE]
    bodies = (item[1][2] for item in repeats if str(item[0]) in REPEATS)
    return len(repeats) <= PLAIN_REPEATS and not any(
        str(inner[0]) in WIDE for body in bodies for inner in _inside(body)
    )


def _inside(tree: Iterable[Any]) -> Iterable[Any]:
    """All items of a tree, its own and those below."""
    for item in tree:
        yield item
        for part in item[1] if isinstance(item[1], (tuple, list)) else (item[1],):
            for sub in part if isinstance(part, list) else (part,):
                if isinstance(sub, _parser.SubPattern):
                    yield from _inside(sub)


class _Run:
    """One text: where each item can end is found once for each place that it begins at."""

    def __init__(self, text: str, tree: Any) -> None:
        if tree.state.flags & ~re.UNICODE:
            raise PatternError("it has flags")
        self._text = text
        self._found: dict[tuple[int, int], Collection[int]] = {}
        shared = _allowance.get()
        self._left = [MOST_STEPS] if shared is None else shared

    def sequence(self, items: Sequence[Any], starts: Iterable[int]) -> set[int]:
        """Where items one after the other can end."""
        places = set(starts)
        for item in items:
            self._left[0] -= len(places) + 1
            if self._left[0] < 0:
                raise PatternError("it takes too many steps")
            places = {end for place in places for end in self._ends(item, place)}
        return places

    def _ends(self, item: Any, place: int) -> Collection[int]:
        key = id(item), place
        if key not in self._found:
            self._found[key] = self._new_ends(str(item[0]), item[1], place)
        return self._found[key]

    def _new_ends(self, kind: str, given: Any, place: int) -> Collection[int]:
        if kind in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            fits = place < len(self._text) and _has(kind, given, self._text[place])
            return (place + 1,) if fits else ()
        if kind == "AT":
            return (place,) if self._is_at(str(given), place) else ()
        if kind == "BRANCH":
            return {end for way in given[1] for end in self.sequence(way, (place,))}
        if kind == "SUBPATTERN" and not given[1] and not given[2]:
            return self.sequence(given[3], (place,))
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            return self._repeated(place, *given)
        if kind in ("ASSERT", "ASSERT_NOT"):
            return (place,) if self._looks(place, *given) == (kind == "ASSERT") else ()
        raise PatternError(f"it has what is not served ({kind.lower()})")

    def _repeated(self, place: int, least: int, most: int, body: Sequence[Any]) -> set[int]:
        ends = {place} if least == 0 else set()
        times, places = 0, {place}
        while places and times < most:
            following, times = self.sequence(body, places), times + 1
            if times >= least:
                following, ends = following - ends, ends | following
            elif following == places:
                times = least - 1  # and so it would go on
            places = following
        return ends

    def _looks(self, place: int, direction: int, body: Any) -> bool:
        if direction > 0:
            return bool(self.sequence(body, (place,)))
        start = place - body.getwidth()[0]
        return start >= 0 and place in self.sequence(body, (start,))

    def _is_at(self, kind: str, place: int) -> bool:
        text, length = self._text, len(self._text)
        if kind in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return place == 0
        if kind == "AT_END":
            return place == length or (place == length - 1 and text[place] == "\n")
        if kind == "AT_END_STRING":
            return place == length
        before, after = (_is_word(text[i]) if 0 <= i < length else False for i in (place - 1, place))
        return (before != after) == (kind == "AT_BOUNDARY")


def _has(kind: str, given: Any, char: str) -> bool:
    """Whether a character is one that an item stands for."""
    if kind == "ANY":
        return char != "\n"
    if kind == "LITERAL":
        return bool(ord(char) == given)
    if kind == "NOT_LITERAL":
        return bool(ord(char) != given)
    if kind == "RANGE":
        return bool(given[0] <= ord(char) <= given[1])
    if kind == "CATEGORY":
        return _is_of(str(given), char)
    is_negated = given[0][0] is _constants.NEGATE
    return is_negated != any(_has(str(one), of, char) for one, of in given[is_negated:])


def _is_of(category: str, char: str) -> bool:
    name = category.removeprefix("CATEGORY_").removeprefix("UNI_")
    is_of = {"DIGIT": char.isdecimal(), "SPACE": char.isspace(), "WORD": _is_word(char)}
    return not is_of[name.removeprefix("NOT_")] if name.startswith("NOT_") else is_of[name]


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"
