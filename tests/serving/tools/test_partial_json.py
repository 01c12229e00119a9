"""JSON that was cut, read as the parser of Anthropic's and OpenAI's clients reads it."""

import json

import jiter
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lamina.serving.tools.partial_json import object_so_far

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4), st.data(), st.sampled_from([None, 1]))
@example({"a": "\\", "b": [{}, [1]]}, None, None)
def test_a_cut_object_is_read_as_clients_read_it(value, data, indent):
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    assert object_so_far(text) == value
    cuts = range(1, len(text)) if data is None else [data.draw(st.integers(1, max(1, len(text) - 1)))]
    for cut in cuts:
        assert object_so_far(text[:cut]) == jiter.from_json(text[:cut].encode(), partial_mode=True)


@pytest.mark.parametrize(
    "text", ["", "x", "[1, 2", '"a', "1", "null", "}", '{"a": 1}}', '{"a" 1', "{1: 2", "{,"]
)
def test_what_is_no_object_is_an_empty_one(text):
    assert object_so_far(text) in ({}, {"a": 1})


def test_long_and_deep_texts_are_read():
    text = '{"a": [' + "1, " * 50_000
    assert len(object_so_far(text)["a"]) == 50_000
    assert object_so_far('{"a": "' + "\\" * 100_001) == {}
    assert object_so_far("[" * 100_000) == {}
    assert object_so_far('{"a":' * 100_000) == {}  # deeper than JSON is read
