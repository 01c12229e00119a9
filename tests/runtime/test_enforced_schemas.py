"""JSON schemas as grammars: which texts they accept, against what jsonschema says of the values."""

import itertools
import json
import re
import subprocess
import sys
import threading

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from lamina import StructuredOutputs
from lamina.common.errors import RequestError
from lamina.runtime.engine.input_processor import grammar_compiler
from lamina.runtime.structured_output.deep_stack import call_deep
from lamina.runtime.structured_output.grammar import grammar_of
from lamina.runtime.structured_output.open_names import without
from lamina.runtime.tokenization.tokenizer import load_tokenizer

pytest.importorskip("llguidance")
INTEGER, STRING = {"type": "integer"}, {"type": "string"}
ONE = {"type": "object", "properties": {"a": INTEGER}}


@pytest.fixture(scope="module")
def accepts(tiny_text_folder):
    """accepts(schema, text): whether the grammar of the schema accepts the text as a whole."""
    tokenizer = load_tokenizer(tiny_text_folder)
    compiler = grammar_compiler(tokenizer, 512, [1])
    backend = Tokenizer.from_str(tokenizer.as_json())
    backend.encode_special_tokens = True  # as text: they are none where a model writes "<pad>"

    def accept(schema, text):
        matcher = compiler.matcher(grammar_of(StructuredOutputs(json=schema)))
        token_ids = backend.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    return accept


@pytest.mark.parametrize(
    "schema",
    [
        ONE,
        {"properties": {"a": INTEGER}},
        {"allOf": [ONE, {"properties": {"b": INTEGER}}]},
        {**ONE, "additionalProperties": STRING},
        {**ONE, "required": ["a"]},
        {**ONE, "patternProperties": {"^x-": INTEGER}, "additionalProperties": STRING},
        {"type": "object", "patternProperties": {"^a": INTEGER}},
        {"type": "object", "patternProperties": {"^[a-c]+$": INTEGER}},
        {"type": "object", "patternProperties": {"(a|b)$": INTEGER}},
        {"type": "object", "properties": {"o": ONE}, "additionalProperties": ONE},
    ],
)
def test_no_name_passes_for_another_by_escapes(accepts, schema):
    for name in ("a", "\\u0061", "\\u0078-a", "x\\u002d", "z"):
        for value in ('"s"', "1", '{"\\u0061": "s"}'):
            text = f'{{"{name}": {value}}}'
            if accepts(schema, text):
                jsonschema.validate(json.loads(text), schema)


def test_names_beside_the_listed_ones_are_written(accepts):
    assert accepts(ONE, '{"a": 1, "b": "s", "é": null}')
    assert accepts({**ONE, "additionalProperties": STRING}, '{"aa": "s", "": "t"}')
    assert accepts({**ONE, "patternProperties": {"^x-": STRING}}, '{"x-y": "s", "x": 1}')
    assert accepts({"patternProperties": {"^[a-z]+$": STRING}}, '{"ab": "s", "A": 1}')
    required = {"patternProperties": {"[ab]": STRING}, "required": ["a", "q"]}
    assert accepts(required, '{"q": 1, "a": "s"}')
    assert not accepts(required, '{"q": 1, "a": 2}')


@given(
    names=st.lists(st.text(max_size=4), max_size=5),
    beginnings=st.lists(st.text(min_size=1, max_size=3), max_size=3),
    text=st.text(max_size=6),
    chosen=st.integers(0, 20),
)
def test_a_pattern_of_all_other_names_matches_none_of_these(names, beginnings, text, chosen):
    held = [*names, *beginnings, text]
    text = held[chosen % len(held)] + text[: chosen // 7]
    is_other = text not in names and not text.startswith(tuple(beginnings))
    pattern = without(names, beginnings)
    assert bool(re.fullmatch(pattern.removeprefix("^").removesuffix("$"), text)) == is_other


PRINTED = st.text(st.characters(min_codepoint=32, codec="utf-8"), max_size=5)


@given(
    names=st.lists(PRINTED, min_size=1, max_size=4),
    text=PRINTED,
    chosen=st.integers(0, 8),
)
def test_whatever_names_are_listed_others_are_exclusive(accepts, names, text, chosen):
    name = [*names, text][chosen % (len(names) + 1)]
    schema = {"type": "object", "properties": dict.fromkeys(names, INTEGER), "additionalProperties": STRING}
    written = json.dumps(name, ensure_ascii=False)
    if "\x7f" not in name:
        assert accepts(schema, f'{{{written}: "s"}}') == (name not in names)
        assert accepts(schema, f"{{{written}: 1}}") == (name in names)


@pytest.mark.parametrize(
    "schema,right,wrong",
    [
        ({"items": INTEGER, "uniqueItems": False}, "[1, 1]", '["a"]'),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, "[1]", "[1, 1]"),
        ({"$schema": "https://json-schema.org/draft-07/schema", "type": "integer"}, "1", "1.5"),
        ({"$schema": "http://json-schema.org/schema#", "type": "integer"}, "1", "1.5"),
        ({"$schema": "http://json-schema.org/draft-04/schema", **STRING}, '"a"', "1"),
        ({"type": "integer", "format": "int32"}, "1", "1.5"),
        ({"format": "int64", "type": ["integer", "string"]}, '"a"', "1.5"),
        ({**STRING, "format": "password"}, '"a"', "1"),
        ({**STRING, "format": "byte"}, '"YWJj"', '"YWJ"'),
        ({**STRING, "format": "byte", "pattern": "^Y"}, '"YWJj"', '"ZWJj"'),
        ({**STRING, "format": "uri-reference"}, '"../a#b"', '"a b"'),
        ({**STRING, "format": "json-pointer"}, '"/a/~0"', '"a"'),
        ({**STRING, "format": "iri"}, '"http://é"', '"é"'),
    ],
)
def test_what_says_nothing_or_is_a_pattern_is_taken(accepts, schema, right, wrong):
    assert accepts(schema, right)
    assert not accepts(schema, wrong)


def test_words_of_schemas_may_be_names_of_properties(accepts):
    names = {"uniqueItems": STRING, "format": INTEGER, "$schema": STRING, "properties": INTEGER}
    schema = {"type": "object", "properties": names, "additionalProperties": False}
    assert accepts(schema, '{"uniqueItems": "a", "format": 1, "$schema": "x", "properties": 2}')


def test_a_name_written_twice_counts_once(accepts):
    with pytest.raises(RequestError, match="minProperties is 2"):
        grammar_of(StructuredOutputs(json={"type": "object", "minProperties": 2}))
    schema = {**ONE, "required": ["a"], "minProperties": 2}
    assert accepts(schema, '{"a": 1, "b": 1}')
    assert not accepts(schema, '{"a": 1}')


@pytest.mark.parametrize("key", ["allOf", "items", "not", "additionalProperties"])
def test_deep_schemas_are_refused_by_name(key):
    schema = {"type": "object"}
    for _ in range(5000):
        schema = {key: [schema] if key == "allOf" else schema}
    with pytest.raises(RequestError, match="json"):
        grammar_of(StructuredOutputs(json=schema))


@pytest.mark.parametrize(
    "pattern,matched",
    [
        (r'[^"]', r"ab\/[]^&~1" + "\n\r\x01"),
        (r"[^\\]", 'ab"/[]^&~1\n\r\x01'),
        (r'[^"\\]', "ab/[]^&~1\n\r\x01"),
        (r"[^a]", 'b"\\/[]^&~1\n\r\x01'),
        (r'(?:[^"\n]|\n)', r"ab\/[]^&~1" + "\n\r\x01"),
        (r"[\u0000-\u0021\u0023-\uffff]", r"ab\/[]^&~1" + "\n\r\x01"),
        (r"(?:[\x00-!]|[#-\uffff])", r"ab\/[]^&~1" + "\n\r\x01"),
        (r"\P{P}", "ab^~1\n\r\x01"),
        (r"[\P{P}]", "ab^~1\n\r\x01"),
        (r"[^\p{P}]", "ab^~1\n\r\x01"),
        (r"[[a]", "[a"),
        (r"[a&&b~~]", "ab&~"),
        (r"[\]\[^]", "[]^"),
        (r'["]', '"'),
        (r"[\s\S]", 'ab"\\/[]^&~1\n\r\x01'),
        (r"\D", 'ab"\\/[]^&~\n\r\x01'),
        (r".", 'ab"\\/[]^&~1\r\x01'),
    ],
)
def test_patterns_match_the_same_in_quotes(accepts, pattern, matched):
    value = {"type": "string", "pattern": f"^{pattern}$"}
    name = {"patternProperties": {f"^{pattern}$": INTEGER}, "additionalProperties": False}
    for char in 'ab"\\\n\r\x01/[]^&~1':
        assert accepts(value, json.dumps(char)) == (char in matched), char
        assert accepts(name, json.dumps({char: 1})) == (char in matched), char


def way(*required, closed=False, **properties):
    own = {"type": "object", "properties": properties, "required": list(required)}
    return {**own, "additionalProperties": False} if closed else own


VALUES = [None, 1, 1.5, "x", "y", [], {}, *({"a": a} for a in (1, "s")), {"b": 1}, {"a": 1, "b": 1}]
VALUES += [{"k": "x"}, {"k": "y"}, {"k": "x", "a": 1}, {"k": "y", "b": 1, "a": "s"}]
K = {name: {"const": name} for name in "xy"}
EXCLUSIVE = {
    "required names": [{"required": ["a"]}, {"required": ["b"]}],
    "three required names": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["k"]}],
    "types": [STRING, {"type": "null"}, {"type": ["integer", "boolean"]}],
    "a shared null": [{"type": ["string", "null"]}, {"type": ["number", "null"]}],
    "a property's value": [way("k", k=K["x"]), way("k", k=K["y"])],
    "a value of one that requires it": [way("k", k=K["x"]), way(k=K["y"])],
    "references": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}],
    "nullable references": [{"$ref": "#/$defs/x"}, {"type": "null"}, {"$ref": "#/$defs/y"}],
    "values": [{"enum": ["x", None]}, {"enum": [1.5, "y"]}, {"const": 1}],
    "a property's type": [way("a", a=INTEGER), way("a", a=STRING)],
    "names that are closed": [way("a", closed=True, a={}), way("a", "b", closed=True, a={}, b={})],
    "closed and not required": [way(closed=True, a={}), way(closed=True, b={})],
    "a union": [{"anyOf": [STRING, {"type": "array"}]}, {"type": "null"}],
}


@pytest.mark.parametrize("kind", EXCLUSIVE)
@pytest.mark.parametrize("is_typed", [False, True])
def test_what_two_ways_of_a_one_of_accept_is_not_written(accepts, kind, is_typed):
    """Told apart, every instance is written; ways that share some write none of those."""
    schema = {"$defs": {name: way("k", k=value) for name, value in K.items()}, "oneOf": EXCLUSIVE[kind]}
    if is_typed and kind in ("required names", "three required names"):
        schema["type"] = "object"
    validator = jsonschema.Draft202012Validator(schema)
    for value in VALUES:
        orders = itertools.permutations(value.items()) if isinstance(value, dict) else ()
        texts = [json.dumps(dict(order)) for order in orders] or [json.dumps(value)]
        is_written = any(accepts(schema, text) for text in texts)
        assert is_written == validator.is_valid(value), value


@pytest.mark.parametrize(
    "ways",
    [
        [INTEGER, {"type": "number"}],
        [{"enum": ["x"]}, STRING],
        [way("a"), way("a", "b")],
        [{"pattern": "^x"}, STRING],
        [True, STRING],
        [way(), way()],
        [{"$ref": "#"}, STRING],
    ],
)
def test_ways_that_cannot_be_exclusive_are_refused_unless_lenient(accepts, tiny_text_folder, ways):
    with pytest.raises(RequestError, match="two ways of a oneOf"):
        accepts({"oneOf": ways}, "1")
    tokenizer = load_tokenizer(tiny_text_folder)
    compiler = grammar_compiler(tokenizer, 512, [1])
    backend = Tokenizer.from_str(tokenizer.as_json())
    backend.encode_special_tokens = True  # as text: they are none where a model writes "<pad>"
    grammar = grammar_of(StructuredOutputs(json={"oneOf": ways}, lenient=True))
    assert any("oneOf" in each for each in compiler.warnings(grammar))


@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "type": st.sampled_from(["object", "string", ["object", "null"], ["integer", "string"]]),
                "required": st.lists(st.sampled_from("abk"), unique=True, max_size=2),
                "properties": st.dictionaries(
                    st.sampled_from("abk"), st.sampled_from([INTEGER, STRING, *K.values(), {}]), max_size=2
                ),
                "additionalProperties": st.just(False),
                "enum": st.lists(st.sampled_from([None, 1, "x", "y"]), min_size=1, unique=True),
            },
        ),
        min_size=2,
        max_size=3,
    )
)
def test_whatever_the_ways_are_nothing_that_two_accept_is_written(accepts, ways):
    schema = {"oneOf": ways}
    validator = jsonschema.Draft202012Validator(schema)
    for value in VALUES:
        try:
            is_written = accepts(schema, json.dumps(value))
        except RequestError:  # cannot be told apart, or nothing is an instance
            return
        assert not is_written or validator.is_valid(value), value


def chain(num, around):
    links = {f"d{number}": around({"$ref": f"#/$defs/d{number + 1}"}) for number in range(num)}
    return {"$defs": {**links, f"d{num}": STRING}, "$ref": "#/$defs/d0"}


def object_of(inner):
    return {"type": "object", "properties": {"a": inner}}


def nested(num, around):
    own = STRING
    for _ in range(num):
        own = around(own)
    return own


LARGE = {
    "references": {"json": chain(8000, lambda ref: ref)},
    "references in properties": {"json": chain(6000, object_of)},
    "rules": {
        "grammar": "\n".join(["start: r0", *(f'r{n}: "x" r{n + 1}' for n in range(20_000)), 'r20000: "b"'])
    },
    "optional characters": {"regex": "a?" * 20_000},
    "ways": {"json": {"oneOf": [{**object_of({"const": n}), "required": ["a"]} for n in range(3000)]}},
    "ways of a way": {
        "json": {
            "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}] * 30}},
            "oneOf": [{"$ref": "#/$defs/A"}, STRING],
        }
    },
    "patterns of names": {"json": {"patternProperties": {f"^x{n}-": STRING for n in range(2000)}}},
    "lists in an enum": {"json": {"enum": [[n] for n in range(20_000)]}},
    "an open class": {"json": {"type": "string", "pattern": "[" * 200_000}},
    "classes": {"json": {"type": "string", "pattern": "[^a]" * 50_000}},
    "values": {"json": {"enum": [f"value {n}" for n in range(10_000)]}},
    "conditions": {"json": {"allOf": [{"if": object_of({"const": n}), "then": False} for n in range(3000)]}},
    "conditions of conditions": {"json": nested(60, lambda own: {"if": {"not": own}, "else": STRING})},
    "dependencies": {"json": {"dependentRequired": {f"a{n}": ["b"] for n in range(3000)}}},
    "names": {"json": {"propertyNames": {"enum": [f"name {n}" for n in range(10_000)]}}},
    "looks ahead": {"json": {"type": "string", "pattern": f"^{'(?!a)' * 1900}b"}},
}
SCRIPT = """
import json, sys
from lamina import StructuredOutputs
from lamina.common.errors import RequestError
from lamina.runtime.engine.input_processor import grammar_compiler
from lamina.runtime.structured_output.deep_stack import call_deep
from lamina.runtime.structured_output.grammar import grammar_of
from lamina.runtime.tokenization.tokenizer import load_tokenizer
from pathlib import Path

compiler = grammar_compiler(load_tokenizer(Path(sys.argv[1])), 512, [1])
for name, form in json.load(sys.stdin).items():
    try:
        compiler.matcher(grammar_of(StructuredOutputs(**form)))
    except RequestError:
        pass
    print(name, flush=True)
"""


def test_large_forms_are_compiled_or_refused_and_the_process_lives(tiny_text_folder):
    asked = [sys.executable, "-c", SCRIPT, str(tiny_text_folder)]
    done = subprocess.run(asked, input=json.dumps(LARGE), capture_output=True, text=True, timeout=250)
    assert done.stdout.splitlines() == list(LARGE), done.stderr[-2000:]
    assert done.returncode == 0


def test_an_error_in_a_deep_stack_is_the_callers():
    def fail():
        raise KeyError("a")

    with pytest.raises(KeyError):
        call_deep(fail)
    assert call_deep(lambda: threading.current_thread() is threading.current_thread())
    assert threading.stack_size() == 0
