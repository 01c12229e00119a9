"""Lists whose items are unique: what grammars accept and what their masks leave, against jsonschema."""

import itertools
import json
import random

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import StructuredOutputs
from lamina.common.errors import RequestError
from lamina.runtime.engine.input_processor import grammar_compiler
from lamina.runtime.structured_output.grammar import grammar_of
from lamina.runtime.structured_output.unique_items import UniqueItemsMatcher
from lamina.runtime.tokenization.tokenizer import load_tokenizer

pytest.importorskip("llguidance")
INTEGER, STRING = {"type": "integer"}, {"type": "string"}


def unique(items, **more):
    return {"type": "array", "uniqueItems": True, "items": items, **more}


def closed(**properties):
    own = {"type": "object", "properties": properties, "required": list(properties)}
    return {**own, "additionalProperties": False}


@pytest.fixture(scope="module")
def tokenizer(tiny_text_folder):
    return load_tokenizer(tiny_text_folder)


@pytest.fixture(scope="module")
def matcher_of(tokenizer):
    """matcher_of(schema, **form): the matcher of a schema's grammar."""
    compiler = grammar_compiler(tokenizer, 512, [1])
    return lambda schema, **form: compiler.matcher(grammar_of(StructuredOutputs(json=schema, **form)))


@pytest.fixture(scope="module")
def accepts(matcher_of, tokenizer):
    def accept(schema, text, **form):
        matcher, token_ids = matcher_of(schema, **form), tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    return accept


TEXTS = {
    "texts": (
        unique(STRING),
        ["[]", '["a"]', '["a","b"]', '["a","a"]', '["a", "b" , "a"]', '["ab","a","b"]'],
    ),
    "escapes": (unique(STRING), ['["a","\\u0061"]', '["é","\\u00e9"]', '["\\n","\\u000a"]', '["\\n","n"]']),
    "numbers": (
        unique({"type": "number"}),
        ["[1,1]", "[1,1.0]", "[1,10]", "[1,1e0]", "[0,-0]", "[1,1.5,15]"],
    ),
    "values": (
        unique({"enum": ["a", "b", 1, True, None, {"k": [1, 2]}]}),
        [
            '["a","b"]',
            "[1,true]",
            "[true,true]",
            '[{"k":[1,2]},1]',
            '[{"k":[1,2]},{"k": [1, 2]}]',
            "[null,null]",
        ],
    ),
    "objects": (
        unique({"type": "object", "additionalProperties": INTEGER}),
        [
            '[{"a":1},{"a":2}]',
            '[{"a":1},{"a": 1}]',
            '[{"a":1,"b":2},{"b":2,"a":1}]',
            "[{},{}]",
            '[{},{"a":1}]',
        ],
    ),
    "lists of lists": (
        unique(unique(INTEGER)),
        ["[[1],[1]]", "[[1,1]]", "[[1,2],[2,1]]", "[[1,2],[1,2]]", "[[],[]]", "[[1,2],[1]]"],
    ),
    "a property": (
        {"type": "object", "properties": {"x": unique(STRING), "y": {"type": "array", "items": STRING}}},
        ['{"x":["a","a"]}', '{"x":["a","b"],"y":["a","a"]}', '{"y":["a","a"]}', '{"z":[1,1]}'],
    ),
    "names of a pattern": (
        {"patternProperties": {"^x": unique(INTEGER)}, "additionalProperties": {"type": "array"}},
        ['{"xa":[1,1]}', '{"xa":[1,2]}', '{"a":[1,1]}'],
    ),
    "a reference to itself": (
        {"$defs": {"t": unique({"anyOf": [INTEGER, {"$ref": "#/$defs/t"}]})}, "$ref": "#/$defs/t"},
        ["[1,[1]]", "[[1],[1]]", "[[1,1]]", "[[1],[1,[1]]]"],
    ),
    "first items": (
        {"type": "array", "prefixItems": [unique(INTEGER), STRING], "items": {"type": "array"}},
        ["[[1,1]]", '[[1],"a",[1,1]]', '[[1,2],"a"]'],
    ),
    "a name that is a keyword": (
        {"type": "object", "properties": {"uniqueItems": True, "a": unique(INTEGER)}},
        ['{"uniqueItems":[1,1]}', '{"a":[1,1]}', '{"a":[1,2]}'],
    ),
    "a list of anything": ({"uniqueItems": True}, ["[1,1]", '[1,"a",null]', '{"a":[1,1]}', '"a"']),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_no_item_comes_twice_and_no_other_text_is_left_out(accepts, kind):
    schema, texts = TEXTS[kind]
    validator = jsonschema.Draft202012Validator(schema)
    for text in texts:
        assert accepts(schema, text) == validator.is_valid(json.loads(text)), text


LEAVES = st.sampled_from([1, 1.0, 10, "a", "b", "ab", None, True, False])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)
ANY = {"$defs": {"any": {"uniqueItems": True, "items": {"$ref": "#/$defs/any"}}}}
ANY["$defs"]["any"]["additionalProperties"] = {"$ref": "#/$defs/any"}
ANY["$ref"] = "#/$defs/any"


@given(st.lists(VALUES, max_size=4), st.sampled_from([(",", ":"), (", ", ": ")]))
def test_whatever_the_values_a_text_is_accepted_if_it_is_an_instance(accepts, value, separators):
    text = json.dumps(value, separators=separators, ensure_ascii=False)
    assert accepts(ANY, text) == jsonschema.Draft202012Validator(ANY).is_valid(json.loads(text))


FEW = st.sampled_from(
    [
        {"type": "boolean"},
        {"enum": ["a", "ab", "b"]},
        {"enum": [1, 10, "1"]},
        {"type": "integer", "minimum": 1, "maximum": 3},
        {"type": "string", "pattern": "^[AB]{1,2}$"},
        {"type": "string", "enum": ["a", "b"]},
        {"const": "a"},
        {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.5},
        closed(k={"enum": ["a", "b"]}, v={"type": "boolean"}),
        unique({"enum": [1, 2]}),
        unique({"type": "boolean"}, minItems=1),
    ]
)


@given(FEW | st.builds(lambda one, other: {"anyOf": [one, other]}, FEW, FEW), st.integers(0, 99))
def test_masks_lead_to_the_end_of_an_instance_though_few_values_are_left(matcher_of, tokenizer, items, seed):
    """Answers drawn of tokens that the masks leave, the end where there is nothing else."""
    schema, lots = unique(items), random.Random(seed)
    for compact in (True, False):
        matcher, token_ids = matcher_of(schema, compact=compact), []
        while not matcher.is_stopped() and len(token_ids) < 300:
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(mask, bitorder="little").nonzero()[0].tolist()
            assert allowed, tokenizer.decode(token_ids)
            others = [id_ for id_ in allowed if id_ != 1 and tokenizer.decode([id_]).strip()]
            token_ids.append(lots.choice(others or allowed))
            matcher.consume_token(token_ids[-1])
        if matcher.is_stopped():
            jsonschema.validate(json.loads(tokenizer.decode(token_ids)), schema)


@pytest.mark.parametrize("begin", [None, "<think>", "[THINK]", "["])
def test_the_form_is_followed_from_where_the_reasoning_ends(accepts, begin):
    form = {"reasoning_end": "</think>", "reasoning_begin": begin}
    for text, is_right in {"[1,2]": True, "[1,1]": False, "[1, 1]": False}.items():
        reasoning = f"{begin or ''}[7,7] [7,7]</think>"
        assert accepts(unique(INTEGER), reasoning + text, **form) == is_right
        if begin not in (None, "["):
            assert accepts(unique(INTEGER), text, **form) == is_right


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=12), st.integers(0, 50))
def test_going_back_leaves_the_masks_of_before(matcher_of, moves, seed):
    matcher, lots = matcher_of(unique({"enum": ["a", "ab", 1, 10, True]}), compact=True), random.Random(seed)
    masks = [matcher.compute_bitmask()]
    for is_back, count in moves:
        if is_back:
            count = min(count, len(masks) - 1)
            matcher.rollback(count)
            del masks[len(masks) - count :]
        for _ in range(0 if is_back else count):
            if matcher.is_stopped():
                break
            allowed = np.unpackbits(np.frombuffer(masks[-1], np.uint8), bitorder="little").nonzero()[0]
            matcher.consume_token(int(lots.choice(allowed)))
            masks.append(matcher.compute_bitmask())
        assert matcher.compute_bitmask() == masks[-1]
        assert matcher.deep_copy().compute_bitmask() == masks[-1]


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"a": {"$anchor": "b"}}, **unique({"$ref": "#b"})},
        {"$defs": {"a": {"$id": "http://b/c"}}, **unique({"$ref": "http://b/c"})},
        {
            "$defs": {"a": {"$id": "http://b/c", "items": {"$ref": "#/$defs/a"}}},
            **unique({"$ref": "#/$defs/a"}),
        },
        unique({"$dynamicRef": "#b"}),
        {"not": {"uniqueItems": True}},
        {"if": {"uniqueItems": True}, "then": {"maxItems": 3}},
    ],
)
def test_where_it_is_not_known_which_lists_these_are_the_form_is_refused_by_name(matcher_of, schema):
    with pytest.raises(RequestError, match="cannot be enforced"):
        matcher_of(schema)


def test_lenient_leaves_out_what_cannot_be_followed_and_follows_the_rest(accepts, matcher_of):
    assert not accepts(unique(INTEGER), "[1,1]", lenient=True)
    unknown = {"$defs": {"a": {"$id": "http://b/c", "type": "integer"}}, **unique({"$ref": "http://b/c"})}
    assert "uniqueItems" in str(matcher_of(unknown, lenient=True).get_grammar_warnings())


@pytest.mark.parametrize(
    "schema", [STRING, {"type": "array", "uniqueItems": False}, unique(STRING, maxItems=1)]
)
def test_other_forms_have_a_matcher_of_llguidance_itself(matcher_of, schema):
    assert not isinstance(matcher_of(schema), UniqueItemsMatcher)


@pytest.mark.parametrize("items", [INTEGER, unique(INTEGER), {"type": "number"}])
def test_numbers_and_lists_of_any_size_are_followed(accepts, items):
    many = 40
    for text in (
        f"[{','.join(map(str, range(many)))}]",
        f"[{'7' * 320},{'7' * 319}]",
        "[[" + "1" * 400 + "]]",
    ):
        validator = jsonschema.Draft202012Validator(unique(items))
        value = json.loads(text, parse_int=lambda digits: int(digits[:40]) + len(digits))
        assert accepts(unique(items), text) == validator.is_valid(value)
    assert not accepts(unique(items), f"[{','.join(map(str, [*range(many), 0]))}]")


def test_deep_lists_are_followed(accepts):
    deep = {"$defs": {"t": unique({"$ref": "#/$defs/t"})}, "$ref": "#/$defs/t"}
    for depth in (3, 60):
        inner = "[" * depth + "]" * depth
        assert accepts(deep, f"[{inner}]")
        assert not accepts(deep, f"[{inner},{inner}]")
        assert accepts(deep, f"[{inner},[{inner}]]")


def test_each_order_of_all_values_can_be_written_and_nothing_after_them(accepts):
    values = ["a", "ab", 1, None]
    schema = unique({"enum": values})
    for order in itertools.permutations(values):
        assert accepts(schema, json.dumps(order))
        for value in values:
            assert not accepts(schema, json.dumps([*order, value]))
