"""JSON that may have been cut: as much of an object as is certain."""

import json
import re
from typing import Any

TOKEN = re.compile(r'\s*+(?:("(?:[^"\\]|\\.)*+")|([-+.\w]+)|([{}\[\],:]))', re.DOTALL)
CLOSING = {"{": "}", "[": "]"}


def object_so_far(text: str) -> dict[str, Any]:
    """Returns the object that a text is, or what of it stands before the place where it is cut.

    A member is there once its value has begun, if that is a list or an object, else once it is whole; {} for
    what is no object.
    """
    found = _loaded(text)
    return (_loaded(_closed(text)) if found is None else found) or {}


def _loaded(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _closed(text: str) -> str:
    """Returns the text up to the last place where closing all that is open makes it JSON, closed there."""
    end = at = 0
    open_: list[str] = []  # what closes each bracket, the inmost last
    is_key = False
    while found := TOKEN.match(text, at):
        string, word, mark = found.groups()
        at = found.end()
        if mark in CLOSING:
            open_.append(CLOSING[mark])
        elif mark in ("}", "]"):
            if not open_ or open_[-1] != mark:
                break
            open_.pop()
        elif word is not None and not _is_value(word):
            break
        is_inside = bool(open_) and open_[-1] == "}"
        if mark not in (",", ":") and not (string is not None and is_key):
            end = at
        is_key = is_inside and mark in ("{", ",")
    return text[:end] + "".join(reversed(open_))


def _is_value(word: str) -> bool:
    try:
        json.loads(word)
    except ValueError:
        return False
    return True
