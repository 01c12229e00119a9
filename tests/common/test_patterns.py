"""Expressions of others say what Python's own engine says, within bounded work."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.common import patterns
from lamina.common.patterns import PatternError, matches, matches_whole, searches

ATOMS = ["a", "b", ".", "[ab]", "[^a]", r"\w", r"\d", r"\s", "^", "$", r"\b", r"\B", "_", r"[\W1-3]", ""]
ATOMS += ["(?=a)", "(?!b)", "(?<=a)", "(?<!b)"]
TEXTS = st.text(alphabet="ab_1 \nß", max_size=8)
TIMES = ["*", "+", "?", "*?", "{2}", "{1,2}", "{2,}"]
EXPRESSIONS = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("(?:{0[0]}|{0[1]})".format),
        st.tuples(inner, st.sampled_from(TIMES)).map("({0[0]}){0[1]}".format),
    ),
    max_leaves=6,
)
FOR_YEARS = [
    *("^(a+)+$", "^(a|aa)+$", "(x?a+)+b", "^(([a-z])+.)+[A-Z]([a-z])+$"),
    *("((a{1,9}){1,9}){1,9}b", "(a*)*(a*)*b"),
]


@given(pattern=EXPRESSIONS, text=TEXTS)
def test_it_says_what_pythons_engine_says(pattern, text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patterns, "PLAIN_TEXT", -1)
        assert searches(pattern, text) == (re.search(pattern, text) is not None)
        assert matches(pattern, text) == (re.match(pattern, text) is not None)
        assert matches_whole(pattern, text) == (re.fullmatch(pattern, text) is not None)


@pytest.mark.parametrize("pattern", FOR_YEARS)
def test_what_python_would_backtrack_through_for_years_is_decided(pattern):
    assert searches(pattern, "a" * 60 + "!") is False


@pytest.mark.parametrize("pattern", ["((a{1000}){1000}){1000}", "((a|b)*c?)*" * 40 + "z"])
def test_what_takes_too_many_steps_is_refused(pattern):
    with pytest.raises(PatternError, match="too many steps"):
        searches(pattern, "a" * 2000)


def test_many_expressions_share_what_they_may_take():
    texts = ["a" * (200 + length) + "!" for length in range(4000)]
    with pytest.raises(PatternError, match="too many steps"), patterns.shared_steps():
        any(searches("^(a+)+$", text) for text in texts)
    assert searches("^(a+)+$", "a" * 200)


@pytest.mark.parametrize("pattern", [r"((a)\2)+b", "((?i:a)+)+b", "(?i)(a+)+b", "((?>a+))+b"])
def test_what_is_not_served_is_an_error_of_expressions(pattern):
    with pytest.raises(re.error):
        searches(pattern, "a" * 200)


@pytest.mark.parametrize("pattern", ["((", "(?<=a*)b", "(" * 3000 + ")" * 3000])
def test_what_is_no_expression_is_one_too(pattern):
    with pytest.raises(re.error):
        searches(pattern, "a")
