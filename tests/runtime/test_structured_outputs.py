"""Structured outputs: every finished answer has its form, alone as in any batch; what has none is refused."""

import asyncio
import json
import re

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import AsyncRuntime, Runtime, SamplingParams, StructuredOutputs
from lamina.common.errors import RequestError
from lamina.runtime.structured_output.grammar import grammar_of

pytest.importorskip("llguidance")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMS = {
    "schema": (
        StructuredOutputs(json=PERSON, compact=True),
        lambda text: jsonschema.validate(json.loads(text), PERSON),
    ),
    "regex": (
        StructuredOutputs(regex=r"[a-f]{3}-[0-9]{2}"),
        lambda text: re.fullmatch(r"[a-f]{3}-[0-9]{2}", text).group(),
    ),
    "choice": (
        StructuredOutputs(choice=["yes", "nö", 'a "b"\n']),
        lambda text: ["yes", "nö", 'a "b"\n'].index(text),
    ),
    "lark": (
        StructuredOutputs(grammar='start: "x" ("y" | "z") "!"'),
        lambda text: {"xy!", "xz!"}.remove(text),
    ),
    "gbnf": (StructuredOutputs(grammar='root ::= "one" | "two"'), lambda text: {"one", "two"}.remove(text)),
}


@pytest.fixture(scope="module")
def runtime(tiny_text_folder):
    settings = {"dtype": "float32", "compile": False, "num_kv_blocks": 128, "max_num_seqs": 16}
    with Runtime.from_pretrained(tiny_text_folder, **settings) as runtime:
        yield runtime


@pytest.fixture(autouse=True)
def nothing_left(runtime):
    yield
    stats = runtime.stats()
    assert stats["blocks"]["used"] == stats["requests"]["running"] == stats["requests"]["waiting"] == 0
    assert not runtime._loaded.runner._adjuster.grammars._walks


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_every_finished_answer_has_its_form(runtime, kind, temperature):
    form, check = FORMS[kind]
    params = SamplingParams(structured_outputs=form, temperature=temperature, max_tokens=150, n=4, seed=5)
    (output,) = runtime.generate("Once", params)
    for answer in output.outputs:
        assert answer.finish_reason == "stop", answer
        check(answer.text)


def test_any_object_is_json(runtime):
    form = StructuredOutputs(json_object=True, compact=True)
    (output,) = runtime.generate(
        "x", SamplingParams(structured_outputs=form, temperature=1.0, seed=1, max_tokens=200)
    )
    assert output.text.startswith("{")
    if output.outputs[0].finish_reason == "stop":
        assert isinstance(json.loads(output.text), dict)


@given(
    kinds=st.lists(st.sampled_from([*FORMS, None]), min_size=2, max_size=7),
    seed=st.integers(0, 1000),
    adjusted=st.booleans(),
)
def test_constrained_and_free_answers_in_a_batch_are_those_alone(runtime, kinds, seed, adjusted):
    own = {"presence_penalty": 0.7, "logit_bias": {70: 2.0}} if adjusted else {}
    params = [
        SamplingParams(
            structured_outputs=FORMS[kind][0] if kind else None,
            temperature=1.0,
            seed=seed + number,
            max_tokens=12 + number,
            logprobs=1 if number % 2 else None,
            **own,
        )
        for number, kind in enumerate(kinds)
    ]
    prompts = [f"prompt {number}" for number in range(len(kinds))]
    together = runtime.generate(prompts, params)
    for prompt, own_params, output in zip(prompts, params, together, strict=True):
        (alone,) = runtime.generate(prompt, own_params)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids


def test_answers_are_the_same_through_preemption(tiny_text_folder, runtime):
    form = FORMS["schema"][0]
    params = [
        SamplingParams(structured_outputs=form, temperature=1.0, seed=seed, max_tokens=60)
        for seed in range(6)
    ]
    prompts = [f"number {seed}" * 3 for seed in range(6)]
    wide = runtime.generate(prompts, params)
    small = {"dtype": "float32", "compile": False, "num_kv_blocks": 11, "prefix_cache": False}
    with Runtime.from_pretrained(tiny_text_folder, **small) as narrow:
        outputs = narrow.generate(prompts, params)
        assert narrow.stats()["preemptions"] > 0
    assert [each.text for each in outputs] == [each.text for each in wide]


@pytest.mark.parametrize(
    "form, said",
    [
        ({"regex": "[unclosed"}, "cannot be enforced"),
        ({"regex": "(?=x)a"}, "cannot be enforced"),
        ({"json": {"type": "hiccup"}}, "hiccup"),
        ({"json": {"properties": {"foo": "bar"}}}, "cannot be enforced"),
        ({"json": {"$ref": "#/nowhere"}}, "cannot be enforced"),
        ({"json": {"type": "object", "not": {"propertyNames": {"minLength": 1}}}}, "not"),
        ({"json": {"type": "array", "contains": {"const": 1}}}, "contains"),
        ({"json": '{"type"'}, "no JSON"),
        ({"json": float("nan")}, "wanted a JSON schema"),
        ({"json": {"const": float("nan")}}, "JSON cannot hold"),
        ({"json": False}, "accepts nothing"),
        ({"json": "false"}, "accepts nothing"),
        ({"grammar": "start: nowhere"}, "nowhere"),
        ({"grammar": "root ::= ("}, "GBNF"),
        ({"choice": []}, "one or more"),
        ({"choice": [""]}, "not empty"),
        ({"choice": "yes"}, "list of texts"),
        ({"choice": ["a", 1]}, "choice holds 1"),
        ({"regex": ""}, "wanted 1 to"),
        ({"regex": "a" * (2**20 + 1)}, "wanted 1 to"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({}, "has none"),
        ({"json_object": False}, "has none"),
        ({"json_object": 1}, "True or False"),
        ({"regex": "\ud800"}, "regex"),
    ],
)
def test_what_cannot_be_enforced_is_refused_before_it_is_queued(runtime, form, said):
    with pytest.raises(RequestError, match=re.escape(said)):
        runtime.generate("x", SamplingParams(structured_outputs=form))


def test_what_is_left_out_on_demand_is_said(runtime):
    schema = {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 1}, "maxItems": 2}
    form = StructuredOutputs(json=schema, lenient=True)
    (output,) = runtime.generate("x", SamplingParams(structured_outputs=form, temperature=0.0, max_tokens=99))
    assert output.text.startswith("[")


def test_ignore_eos_is_refused_and_min_tokens_beyond_the_form_ends_its_request_alone(runtime):
    form = StructuredOutputs(choice=["a"])
    with pytest.raises(RequestError, match="ignore_eos is True"):
        runtime.generate("x", SamplingParams(structured_outputs=form, ignore_eos=True))
    with pytest.raises(RequestError, match="leaves no token here that min_tokens"):
        runtime.generate("x", SamplingParams(structured_outputs=form, min_tokens=20, max_tokens=30))
    either = StructuredOutputs(regex="[ab]c")
    allowed = [runtime.tokenizer.encode(letter)[-1] for letter in "ab"]
    with pytest.raises(RequestError, match="leaves no token here"):
        runtime.generate("x", SamplingParams(structured_outputs=either, allowed_token_ids=allowed))


def test_a_model_without_a_tokenizer_refuses(tiny_folder):
    with (
        Runtime.from_pretrained(tiny_folder, compile=False) as runtime,
        pytest.raises(RequestError, match="needs a tokenizer"),
    ):
        runtime.generate([1], SamplingParams(structured_outputs=StructuredOutputs(choice=["a"])))


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_an_engine_elsewhere_answers_the_same(tiny_text_folder, runtime, engine):
    forms = [form for form, _ in FORMS.values()]
    params = [SamplingParams(structured_outputs=f, temperature=1.0, seed=3, max_tokens=40) for f in forms]
    settings = {"dtype": "float32", "compile": False, "num_kv_blocks": 128, "max_num_seqs": 16}

    async def ask():
        async with await AsyncRuntime.from_pretrained(tiny_text_folder, engine=engine, **settings) as other:
            generations = [other.generate("Once", own) for own in params]
            with pytest.raises(RequestError, match="cannot be enforced"):
                other.generate("Once", SamplingParams(structured_outputs={"regex": "[unclosed"}))
            return [(await each.output()).text for each in generations]

    assert asyncio.run(ask()) == [each.text for each in runtime.generate(["Once"] * len(params), params)]


def test_a_long_schema_is_a_form_too(runtime):
    schema = {"enum": [f"value number {number}" for number in range(8000)]}
    form = StructuredOutputs(json=schema)
    assert len(form.json) > 2**16
    (output,) = runtime.generate("x", SamplingParams(structured_outputs=form, max_tokens=40, temperature=0.0))
    assert json.loads(output.text) in schema["enum"]


def test_many_prompts_of_one_form_write_its_grammar_once(runtime):
    forms = [StructuredOutputs(choice=[f"once for {number}" for number in range(9)]) for _ in range(5)]
    before = grammar_of.cache_info().misses
    for form in forms:
        runtime.generate(["a"] * 4, SamplingParams(max_tokens=2, structured_outputs=form))
    assert grammar_of.cache_info().misses == before + 1
