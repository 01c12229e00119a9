"""Stop strings: found wherever in tokens they begin and end, cut off, and never shown before."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.runtime.tokenization.detokenizer import IncrementalDetokenizer
from lamina.runtime.tokenization.plain_tokens import PlainToken


class Scripted:
    """A tokenizer whose tokens are these pieces of text."""

    byte_token_ids: frozenset[int] = frozenset()

    def __init__(self, *pieces: str, special: Sequence[str] = ()) -> None:
        self.pieces = (*pieces, *special)
        self.plain_tokens: dict[int, PlainToken | None] = defaultdict(lambda: None)
        self.special_tokens = {self.pieces.index(piece): piece for piece in special}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = (i for i in token_ids if not (skip_special_tokens and i in self.special_tokens))
        return "".join(self.pieces[i] for i in shown)

    def stream(self, *token_ids: int, **settings: Any) -> tuple[list[str], IncrementalDetokenizer]:
        detokenizer = IncrementalDetokenizer(self, **settings)
        deltas = [detokenizer.append([i]) for i in token_ids or range(len(self.pieces))]
        return [*deltas, detokenizer.finish()], detokenizer


def test_a_stop_string_over_several_tokens_never_leaks() -> None:
    deltas, detokenizer = Scripted("DEF", "G", "HI", "J", "K").stream(stop=["DEFGHIJ"])
    assert "".join(deltas) == ""
    assert detokenizer.stop_reason == "DEFGHIJ"
    assert detokenizer.num_tokens == 4


@pytest.mark.parametrize(("include", "text"), [(False, "a x"), (True, "a xstop")])
def test_text_before_a_stop_inside_a_token_is_kept(include: bool, text: str) -> None:
    deltas, detokenizer = Scripted("a ", "xstop!y", "z").stream(
        stop=["stop"], include_stop_str_in_output=include
    )
    assert "".join(deltas) == text
    assert detokenizer.num_tokens == 2


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab<|end|>")])
def test_a_stop_string_that_is_a_special_token_stops_though_it_is_hidden(
    skip: bool, include: bool, text: str
) -> None:
    settings = {"skip_special_tokens": skip, "include_stop_str_in_output": include}
    deltas, detokenizer = Scripted("a", "b", "c", special=["<|end|>"]).stream(
        0, 1, 3, 2, stop=["<|end|>"], **settings
    )
    assert "".join(deltas) == text
    assert detokenizer.stop_reason == "<|end|>"


def test_what_may_begin_a_stop_string_is_held_and_given_out_when_it_does_not() -> None:
    deltas, detokenizer = Scripted("a", "EN", "x", "E").stream(stop=["END"])
    assert deltas == ["a", "", "ENx", "", "E"]
    assert detokenizer.stop_reason is None


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, 1), (1, 2), (5, 6), (6, 7), (7, None)])
def test_no_stop_is_found_within_the_first_min_tokens_tokens(min_tokens: int, expected: int | None) -> None:
    for special in ((), ("x",)):
        pieces = Scripted(*(() if special else ("x",)), special=special)
        deltas, detokenizer = pieces.stream(*[0] * 7, stop=["x"], min_tokens=min_tokens)
        assert detokenizer.num_tokens == (expected or 7)
        assert (detokenizer.stop_reason is None) == (expected is None)
        assert "".join(deltas) == ("" if special else "x" * (7 if expected is None else expected - 1))


def test_a_stop_string_begun_within_min_tokens_is_found_when_it_ends_later() -> None:
    deltas, detokenizer = Scripted("aE", "N", "D!").stream(stop=["END"], min_tokens=2)
    assert ("".join(deltas), detokenizer.num_tokens) == ("a", 3)


def test_a_shorter_stop_within_the_held_text_of_the_first_tokens_does_not_count_later() -> None:
    deltas, detokenizer = Scripted("aa", "c").stream(stop=["a", "aab"], min_tokens=1)
    assert ("".join(deltas), detokenizer.stop_reason) == ("aac", None)


def test_the_first_stop_string_to_be_complete_counts_then_the_first_to_begin() -> None:
    assert "".join(Scripted("xabcd").stream(stop=["abcd", "bc"])[0]) == "xa"
    assert "".join(Scripted("xabcd").stream(stop=["bc", "abc"])[0]) == "x"


def test_tokens_after_a_stop_are_not_taken() -> None:
    detokenizer = IncrementalDetokenizer(Scripted("a", "X", "b"), stop=["X"])
    assert detokenizer.append([0, 1, 2]) == "a"
    assert (detokenizer.append([2]), detokenizer.finish(), detokenizer.num_tokens) == ("", "", 2)


def cut_at_stop(pieces: Sequence[str], stops: Sequence[str], min_tokens: int) -> tuple[str, int | None]:
    """The definition, by character: the text before the first stop to be complete, and its token."""
    text = ""
    for number, piece in enumerate(pieces, start=1):
        for character in piece:
            text += character
            complete = [stop for stop in stops if text.endswith(stop)]
            if complete and number > min_tokens:
                return text[: -max(map(len, complete))], number
    return text, None


@given(
    pieces=st.lists(st.text("ab", max_size=4), min_size=1, max_size=10),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    min_tokens=st.integers(0, 4),
    data=st.data(),
)
def test_stopping_follows_its_definition_however_tokens_arrive(
    pieces: list[str], stops: list[str], min_tokens: int, data: st.DataObject
) -> None:
    expected, number = cut_at_stop(pieces, stops, min_tokens)
    deltas, detokenizer = Scripted(*pieces).stream(stop=stops, min_tokens=min_tokens)
    assert ("".join(deltas), detokenizer.num_tokens) == (expected, number or len(pieces))
    assert (detokenizer.stop_reason is None) == (number is None)
    cut = data.draw(st.integers(0, len(pieces)))
    at_once = IncrementalDetokenizer(Scripted(*pieces), stop=stops, min_tokens=min_tokens)
    parts = [at_once.append(range(cut)), at_once.append(range(cut, len(pieces))), at_once.finish()]
    assert ("".join(parts), at_once.num_tokens) == (expected, number or len(pieces))
