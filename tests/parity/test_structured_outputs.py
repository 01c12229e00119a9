"""The demo model under sixty schemas, expressions and choices: finished answers keep to their form."""

import json
import re

import jsonschema
import pytest

from lamina import CompileConfig, Runtime, SamplingParams, StructuredOutputs

pytest.importorskip("llguidance")
pytestmark = [pytest.mark.demo, pytest.mark.long, pytest.mark.timeout(900)]  # the first of all compiles it

SHORT = {"type": "string", "maxLength": 12}
COUNT = {"type": "integer", "minimum": 0, "maximum": 999}
LEAVES = {
    "text": SHORT,
    "count": COUNT,
    "flag": {"type": "boolean"},
    "enum": {"enum": ["red", 2, None, {"a": [1]}]},
    "const": {"const": "fixed"},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"},
    "date": {"type": "string", "format": "date"},
    "number": {"type": "number", "minimum": -5, "maximum": 5, "multipleOf": 0.5},
    "union": {"anyOf": [COUNT, SHORT, {"type": "null"}]},
    "either": {"oneOf": [{"type": "boolean"}, {"const": "neither"}]},
}


def object_of(**properties):
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


SHAPES = {
    "itself": lambda leaf: leaf,
    "field": lambda leaf: object_of(value=leaf, note=SHORT),
    "optional field": lambda leaf: object_of(value=leaf, other=COUNT) | {"required": ["other"]},
    "list": lambda leaf: {"type": "array", "items": leaf, "minItems": 1, "maxItems": 3},
    "nested lists": lambda leaf: {
        "type": "array",
        "items": {"type": "array", "items": leaf, "minItems": 1, "maxItems": 2},
        "maxItems": 2,
    },
    "reference": lambda leaf: {"$defs": {"leaf": leaf}, **object_of(a={"$ref": "#/$defs/leaf"}, b=SHORT)},
}
CONSTANT = "once upon a time there was a house at the end of a long road by the sea, with a green door"
SCHEMAS = {f"{leaf}, {shape}": SHAPES[shape](LEAVES[leaf]) for leaf in LEAVES for shape in SHAPES}


@pytest.fixture(scope="module")
def runtime(demo_model):
    with Runtime.from_pretrained(demo_model, max_num_seqs=64) as runtime:
        yield runtime


def ask(runtime, forms, temperature):
    question = [{"role": "user", "content": "Give me an example, in JSON."}]
    prompt = runtime.apply_chat_template(question)
    params = [
        SamplingParams(structured_outputs=form, temperature=temperature, seed=seed, max_tokens=160)
        for seed, form in enumerate(forms)
    ]
    return [output.outputs[0] for output in runtime.generate([prompt] * len(params), params)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_finished_answer_validates(runtime, temperature):
    assert len(SCHEMAS) == 60
    forms = [StructuredOutputs(json=schema, compact=True) for schema in SCHEMAS.values()]
    answers = ask(runtime, forms, temperature)
    finished = 0
    for name, schema, answer in zip(SCHEMAS, SCHEMAS.values(), answers, strict=True):
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), schema, format_checker=jsonschema.FormatChecker())
            finished += 1
        else:
            assert answer.finish_reason == "length", name
    assert finished >= 55, f"{finished} of 60 answers ended"


def test_forced_tokens_change_no_answer(demo_model):
    """In the mode in which the number of a step's tokens changes no bits: jumps change that number."""
    settings = {"max_num_seqs": 4, "compile": CompileConfig(batch_invariant=True)}
    forms = [StructuredOutputs(json=schema, compact=True) for schema in SCHEMAS.values()]
    # whose long constants are worth a jump in a batch of four, whatever else the model says there
    forms += [StructuredOutputs(regex=f"[ab]{CONSTANT}[cd]")] * 4
    texts, num_forced = [], []
    for jumps in (False, True):
        with Runtime.from_pretrained(demo_model, jump_forward=jumps, **settings) as own:
            texts.append([(answer.text, answer.token_ids) for answer in ask(own, forms, 0.7)])
            num_forced.append(own.stats()["forced_tokens"])
    assert texts[0] == texts[1]
    assert num_forced[0] == 0
    assert num_forced[1] > 2 * len(CONSTANT.split())


def test_expressions_and_choices_are_kept(runtime):
    patterns = [r"[a-z]{3,8}@[a-z]{3,8}\.(com|org)", r"(\+[0-9]{1,2} )?[0-9]{3}-[0-9]{4}", "yes|no|maybe"]
    choices = [["Paris", "Rome"], ["größer", "kleiner"], ["a", "ab", "abc"]]
    forms = [StructuredOutputs(regex=pattern) for pattern in patterns]
    forms += [StructuredOutputs(choice=texts) for texts in choices]
    answers = ask(runtime, forms, 1.0)
    assert all(answer.finish_reason == "stop" for answer in answers)
    for pattern, answer in zip(patterns, answers[:3], strict=True):
        assert re.fullmatch(pattern, answer.text)
    for texts, answer in zip(choices, answers[3:], strict=True):
        assert answer.text in texts
