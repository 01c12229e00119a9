"""Conditions of JSON schemas, written as alternatives: what grammars accept, against jsonschema."""

import itertools
import json
import re

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import StructuredOutputs
from lamina.common.errors import RequestError
from lamina.runtime.engine.input_processor import grammar_compiler
from lamina.runtime.structured_output.grammar import grammar_of
from lamina.runtime.structured_output.lookarounds import texts_without, without_lookarounds
from lamina.runtime.tokenization.tokenizer import load_tokenizer

pytest.importorskip("llguidance")
INTEGER, STRING = {"type": "integer"}, {"type": "string"}
VALUES = [None, True, False, 0, 1, 2, -3, 1.5, "", "x", "y", "xy", [], [1], ["x", 1], {}]
VALUES += [dict(zip("abk", each, strict=False)) for each in itertools.product((1, "x"), repeat=2)]
VALUES += [{"a": 1}, {"b": "x"}, {"k": "x"}, {"k": "y"}, {"k": "x", "a": 1}, {"k": "y", "b": 1}, {"z": 1}]


@pytest.fixture(scope="module")
def accepts(tiny_text_folder):
    """accepts(schema, value): whether the grammar of the schema accepts the value in some order of names."""
    tokenizer = load_tokenizer(tiny_text_folder)
    compiler = grammar_compiler(tokenizer, 512, [1])

    def accept(schema, value):
        own = compiler.matcher(grammar_of(StructuredOutputs(json=schema)))
        orders = itertools.permutations(value.items()) if isinstance(value, dict) else ()
        ways = [dict(order) for order in orders] or [value]
        for text in [json.dumps(way, ensure_ascii=False) for way in ways]:
            matcher, token_ids = own.deep_copy(), tokenizer.encode(text, add_special_tokens=False)
            if matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting():
                return True
        return False

    return accept


def of(key, value, *, required=False):
    return {"properties": {key: value}, **({"required": [key]} if required else {})}


KX = of("k", {"const": "x"})
ALL = {
    "no null": {"not": {"type": "null"}},
    "no number": {"not": {"type": "number"}},
    "no value": {"not": {"enum": [0, "x", True, None]}},
    "not this number": {"type": "integer", "not": {"const": 1}},
    "no name": {"not": {"required": ["a"]}},
    "not both names": {"not": {"required": ["a", "b"]}},
    "none of these names": {"type": "object", "not": {"anyOf": [{"required": ["a"]}, {"required": ["k"]}]}},
    "no such property": {"not": of("a", INTEGER, required=True)},
    "no such text": {"type": "string", "not": {"pattern": "^x"}},
    "no short text": {"type": "string", "not": {"maxLength": 1}},
    "not above": {"type": "number", "not": {"minimum": 1}},
    "not twice": {"not": {"not": STRING}},
    "if then": {"if": {**KX, "required": ["k"]}, "then": {"required": ["a"]}},
    "if then else": {"if": {**KX, "required": ["k"]}, "then": {"required": ["a"]}, "else": of("b", INTEGER)},
    "if it is there": {"if": KX, "then": {"properties": {"a": INTEGER}}},
    "if else": {"if": STRING, "else": {"type": ["object", "null"]}},
    "if alone": {"type": "string", "if": {"minLength": 1}},
    "if true": {"if": True, "then": STRING, "else": INTEGER},
    "if false": {"if": False, "then": STRING, "else": INTEGER},
    "if a reference": {"$defs": {"s": STRING}, "if": {"$ref": "#/$defs/s"}, "then": {"maxLength": 1}},
    "dependent names": {"type": "object", "dependentRequired": {"a": ["b"], "b": ["a", "k"]}},
    "dependent schemas": {"dependentSchemas": {"a": of("b", STRING), "k": {"maxProperties": 1}}},
    "early dependencies": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "dependencies": {"a": ["b"], "k": of("k", {"const": "x"})},
    },
    "names of a few": {"propertyNames": {"enum": ["a", "k"]}},
    "names of a few of which one is listed": {"propertyNames": {"enum": ["a", "k"]}, **of("a", INTEGER)},
    "names of a pattern": {"type": "object", "propertyNames": {"pattern": "^[ab]$"}},
    "listed names beside the pattern": {"propertyNames": {"pattern": "^[ab]$"}, **of("k", INTEGER)},
    "names that are texts": {"propertyNames": {"type": "string", "description": "a name"}},
    "short names": {"propertyNames": {"maxLength": 0}},
    "names but these": {"propertyNames": {"not": {"enum": ["a", "b"]}}},
    "one at least": {**of("a", INTEGER), "minProperties": 1, "additionalProperties": False},
    "one at most": {**of("a", INTEGER), "maxProperties": 1, "additionalProperties": False},
    "one": {
        "properties": {"a": INTEGER, "k": STRING},
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": False,
    },
    "an annotated reference": {"$defs": {"s": STRING}, "$ref": "#/$defs/s", "title": "a", "x-more": 1},
    "an early reference": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {"a": {"$ref": "#/definitions/s", "type": "integer"}},
        "definitions": {"s": STRING},
    },
    "a reference into a condition": {
        "properties": {"a": {"$ref": "#/definitions/c/if"}},
        "definitions": {"c": {"if": STRING, "then": INTEGER}},
    },
    "a draft of somebody's own": {"$schema": "https://example.org/own.json", "type": "string"},
}


@pytest.mark.parametrize("kind", ALL)
def test_conditions_leave_their_instances_and_no_others(accepts, kind):
    validator = jsonschema.validators.validator_for(ALL[kind], default=jsonschema.Draft202012Validator)
    if kind == "a draft of somebody's own":
        validator = jsonschema.Draft202012Validator
    for value in VALUES:
        assert accepts(ALL[kind], value) == validator(ALL[kind]).is_valid(value), value


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"items": INTEGER}},
        {"not": {"pattern": "a.*b"}},
        {"not": {"contains": INTEGER}},
        {"if": {"items": INTEGER}, "then": {"maxItems": 1}},
        {"contains": INTEGER},
        {"propertyNames": {"pattern": "^a", "maxLength": 3}},
        {"propertyNames": {"pattern": "("}},
        {"dependencies": 3},
    ],
)
def test_what_is_not_known_as_alternatives_is_refused_by_name(accepts, schema):
    with pytest.raises(RequestError, match="cannot be enforced"):
        accepts(schema, {})


LEAVES = st.sampled_from(
    [
        {"required": ["a"]},
        {"required": ["a", "k"]},
        KX,
        of("a", INTEGER),
        of("b", STRING, required=True),
        STRING,
        {"type": ["object", "null"]},
        {"enum": [1, "x", None]},
        {"const": True},
        {"minimum": 1},
        {"maxLength": 1},
        {"pattern": "^x"},
        {},
    ]
)


def conditions(inner):
    names = st.sampled_from("abk")
    return st.one_of(
        st.builds(lambda own: {"not": own}, inner),
        st.builds(lambda own, then: {"if": own, "then": then}, inner, inner),
        st.builds(lambda own, then, other: {"if": own, "then": then, "else": other}, inner, inner, inner),
        st.builds(lambda name, own: {"dependentSchemas": {name: own}}, names, inner),
        st.builds(lambda name, own: {"dependentRequired": {name: own}}, names, st.lists(names, unique=True)),
        st.builds(lambda own, other: {"allOf": [own, other]}, inner, inner),
        st.builds(lambda own, other: {"anyOf": [own, other]}, inner, inner),
        st.builds(lambda name, own: {"properties": {name: own}}, names, inner),
    )


@given(st.recursive(LEAVES, conditions, max_leaves=5))
def test_whatever_the_conditions_no_other_value_is_accepted(accepts, schema):
    validator = jsonschema.Draft202012Validator(schema)
    for value in VALUES:
        try:
            is_accepted = accepts(schema, value)
        except RequestError:  # not known, or nothing is an instance
            return
        assert not is_accepted or validator.is_valid(value), value


PATTERNS = {
    r"^(?!aws:)[a-z:]*$": True,
    r"^(?!aws:.*).{1,9}$": True,
    r"^(?!a|bc)[a-c]*$": True,
    r"^(?!(abc|bc)$)[a-c]*$": True,
    r"^(?!_{2})[_a]+$": True,
    r"^(?![Aa|][bB])[aAbB|]*$": True,
    r"^(?!\s*$)[ a]*$": True,
    r"^(?=.{1,3}$)[a-c]*": True,
    r"^(?=a)(?!ab)(?!ac$)[a-c]*$": True,
    r"^(?=^[a-c]*$).{1,2}$": True,
    r"^(?!\[)[\[a]*$": True,
    r"^(?!a)(a|b|[|])*$": True,
    r"^(?!a)b|c": False,
    r"(?!a)b": False,
    r"^a(?=b)": False,
    r"^(?<!a)b": False,
    r"^(?!a+)b": False,
    r"^(?!(a|b)c|d)b": False,
    r"^(?!\d)b": False,
    r"^(?=a|b)b|c": False,
}


@pytest.mark.parametrize("pattern", PATTERNS)
@given(st.text("abcAB:_w s[|", max_size=5) | st.sampled_from(["aws:", "aws:a", "abc", "bc", "\n", "ab\n"]))
def test_looks_ahead_are_other_patterns_that_all_match(pattern, text):
    found = without_lookarounds({"pattern": pattern})
    if not PATTERNS[pattern]:
        assert found == {"pattern": pattern}
        return
    parts = [found["pattern"], *(each["pattern"] for each in found["allOf"])]
    assert not any("(?=" in part or "(?!" in part for part in parts)
    is_matched = all(re.search(part, text) for part in parts)
    assert is_matched == bool(re.search(pattern, text)) or ("\n" in text and not is_matched)


@pytest.mark.parametrize("pattern", [r"^a", r"^ab$", r"^(a|bc)", r"^a{2}", r"^[ab]c"])
@given(st.text("abc\n", max_size=4))
def test_other_texts_than_those_of_a_pattern(pattern, text):
    is_other = bool(re.search(texts_without(pattern), text))
    assert is_other != bool(re.search(pattern, text)) or ("\n" in text and not is_other)


HALVES = [r"[\u0020-\uDFFF]", r"[\uD800-\uFFFF]", r"[\uD800a-\uDBFF-\uDC00\uDFFFb]"]


@pytest.mark.parametrize("pattern", HALVES)
def test_halves_of_characters_in_classes_are_none(accepts, pattern):
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    for char in "ab \ue000":
        assert accepts(schema, char) == bool(re.search(pattern, char)), char
