"""Names of fields that callers give and that do not exist: refused with the name that does."""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from .errors import shown

Class = TypeVar("Class", bound=type[Any])


def refuse_unknown(error: type[Exception], advice: Mapping[str, str]) -> Callable[[Class], Class]:
    """A decorator of a keyword-only dataclass: a field that it does not have raises `error`.

    The message says what `advice` holds for that name, such as that of another library, else which of the
    dataclass's own names it resembles.
    """

    def decorate(kind: Class) -> Class:
        known = frozenset(field.name for field in dataclasses.fields(kind))
        build = kind.__init__

        @functools.wraps(build)
        def checked(self: Any, /, *values: Any, **given: Any) -> None:
            if values:
                raise error(f"{kind.__name__} is given {shown(values[0])} without a name; name every field")
            for name in given.keys() - known:
                raise error(f"{kind.__name__} has no {shown(name)}; {hint(name, known, advice)}")
            build(self, **given)

        kind.__init__ = checked
        return kind

    return decorate


def hint(name: str, known: Iterable[str], advice: Mapping[str, str]) -> str:
    """What to write in place of an unknown name."""
    if name in advice:
        return advice[name]
    names = sorted(known)
    near = difflib.get_close_matches(name[:80].lower(), [*names, *advice], n=1, cutoff=0.7)
    if not near:
        return f"wanted one of {', '.join(names)}"
    return f"did you mean {near[0]!r}?" + (f" {advice[near[0]]}" if near[0] in advice else "")
