"""The tokens that a list has now, as a tuple would hold them, without a copy: the list only grows."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, overload


class PrefixView(Sequence[int]):
    """As many first tokens of a list as it had when this was made; equal to the tuple of them."""

    __slots__ = ("_length", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._length = len(tokens)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[int, ...]: ...
    def __getitem__(self, place: int | slice) -> int | tuple[int, ...]:
        places = range(self._length)[place]  # raises IndexError as a tuple does
        if isinstance(places, int):
            return self._tokens[places]
        if places.step == 1:
            return tuple(self._tokens[places.start : places.stop])
        return tuple(self._tokens[each] for each in places)

    def __iter__(self) -> Iterator[int]:
        return islice(self._tokens, self._length)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (tuple, PrefixView)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: Any) -> tuple[int, ...]:
        return tuple(self) + tuple(other)

    def __radd__(self, other: Any) -> tuple[int, ...]:
        return tuple(other) + tuple(self)

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)
