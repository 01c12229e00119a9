"""Patterns of a schema that Python would backtrack through for years hold up nobody."""

import pytest

from lamina import RequestError, StructuredOutputs
from lamina.runtime.engine.input_processor import grammar_compiler
from lamina.runtime.structured_output.grammar import grammar_of
from lamina.runtime.structured_output.schema_places import _may_match
from lamina.runtime.tokenization.tokenizer import load_tokenizer

HOSTILE, NAME = "^(a+)+$", "a" * 60 + "!"
SCHEMAS = {
    "names": {"properties": {NAME: {}}, "propertyNames": {"pattern": HOSTILE}},
    "required": {"required": [NAME], "patternProperties": {HOSTILE: {"type": "string"}}},
    "listed": {"properties": {NAME: {"type": "integer"}}, "patternProperties": {HOSTILE: {"type": "string"}}},
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_a_schema_with_a_hostile_pattern_of_names_is_compiled(tiny_text_folder, schema):
    compiler = grammar_compiler(load_tokenizer(tiny_text_folder), 320, [1])
    assert compiler.matcher(grammar_of(StructuredOutputs(json={"type": "object", **schema})))


def test_a_pattern_of_names_that_takes_too_many_steps_is_refused(tiny_text_folder):
    names = {"pattern": "((a|b)*c?)*" * 40 + "z"}
    schema = {"type": "object", "properties": {"a" * 3000: {}}, "propertyNames": names}
    compiler = grammar_compiler(load_tokenizer(tiny_text_folder), 320, [1])
    with pytest.raises(RequestError, match="propertyNames"):
        compiler.matcher(grammar_of(StructuredOutputs(json=schema)))


def test_where_it_is_asked_for_a_name_of_an_answer_it_is_decided_too():
    assert not _may_match(HOSTILE, NAME)
