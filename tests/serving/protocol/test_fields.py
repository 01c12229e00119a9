"""Every field by its name: what it becomes, and that whatever else stands there is a 400 that names it."""

import json
import math
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.serving.errors import ApiError
from lamina.serving.protocol.chat import ChatRequest
from lamina.serving.protocol.completions import CompletionRequest
from lamina.serving.protocol.generation import StreamOptions

BODIES = {
    ChatRequest: {"messages": [{"role": "user", "content": "hello"}]},
    CompletionRequest: {"prompt": "hello"},
}
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
words = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=10)
flags = st.booleans()
ids = st.lists(st.integers(0, 255), min_size=1, max_size=8)
no_number = st.one_of(st.text(max_size=3), st.booleans(), st.just([]), st.just({}), st.just([1]))
no_integer = no_number | st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: x != 0)
no_flag = st.one_of(st.integers(), st.text(max_size=5), st.floats(0, 1), st.just([]), st.just({}))
no_text = st.one_of(st.integers(), st.booleans(), st.lists(st.text(), max_size=1), st.just({}))


def outside(low, high):
    """Integers below low or above high, and what is none."""
    above = st.nothing() if high is None else st.integers(high + 1, 2**80)
    return st.integers(-(2**80), low - 1) | above | no_integer


def beyond(low, high):
    """Numbers below low or above high, and what is none."""
    above = st.nothing() if high is None else st.floats(high, 1e300, exclude_min=True)
    return st.floats(-1e300, low, exclude_max=True) | above | no_number


@dataclass(frozen=True)
class Field:
    """Values that are honoured, values that are refused, and where the honoured ones are found."""

    good: st.SearchStrategy[Any]
    bad: st.SearchStrategy[Any]
    where: str = "params"  # or "options", or "request"
    name: str | None = None
    beside: tuple[tuple[str, Any], ...] = ()


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
FORMS = ("response_format", "structured_outputs")
no_ids = st.sampled_from(["abc", "-1", "1.5", "", " 1", "٣", "9" * 12])
lists_of_no_text = st.lists(st.integers(), min_size=1, max_size=3) | st.integers() | flags | st.just({})
stops = st.lists(texts.filter(bool), max_size=5)
COMMON = {
    "model": Field(texts, no_text, "request"),
    "n": Field(st.integers(1, 64), outside(1, 1024)),
    "best_of": Field(st.integers(1, 64), outside(1, 1024)),
    "max_tokens": Field(st.integers(1, 10**6), outside(0, 2**31 - 1)),
    "min_tokens": Field(st.integers(0, 16), outside(0, 2**31 - 1)),
    "temperature": Field(st.floats(0, 1e30), beyond(0, 1e39)),
    "top_k": Field(st.integers(-1, 10**6), outside(-1, 2**31 - 1)),
    "top_p": Field(st.floats(1e-9, 1), beyond(0, 1) | st.just(0)),
    "min_p": Field(st.floats(0, 1), beyond(0, 1)),
    "typical_p": Field(st.floats(1e-9, 1), beyond(0, 1) | st.just(0)),
    "presence_penalty": Field(st.floats(-2, 2), beyond(-2, 2)),
    "frequency_penalty": Field(st.floats(-2, 2), beyond(-2, 2)),
    "repetition_penalty": Field(st.floats(1e-9, 1e9), beyond(0, 1e31) | st.just(0)),
    "logit_bias": Field(
        st.dictionaries(st.integers(0, 255).map(str), st.floats(-100, 100), max_size=5),
        st.dictionaries(st.integers(0, 9).map(str), beyond(-100, 100), min_size=1, max_size=2)
        | st.dictionaries(
            st.sampled_from(["abc", "-1", "1.5", "", " 1", "٣", "9" * 12]), st.just(1), min_size=1
        )
        | st.integers()
        | st.just([[1, 2]])
        | st.just("1"),
    ),
    "allowed_token_ids": Field(ids, st.lists(outside(0, 2**31 - 1), min_size=1, max_size=2) | st.just([])),
    "bad_words": Field(st.lists(words, max_size=4), lists_of_no_text | st.just([""]) | st.just("x")),
    "response_format": Field(
        st.sampled_from([{"type": "text"}, {"type": "json_object"}, JSON_SCHEMA]),
        st.sampled_from([{"type": "sound"}, {}, {"type": "json_schema"}, {"type": None}, [], "text", 5])
        | st.sampled_from([{"type": "json_schema", "json_schema": {"name": "x"}}, {"type": 5}]),
        "request",
    ),
    "structured_outputs": Field(
        st.sampled_from([{"json": {}}, {"regex": "a+"}, {"choice": ["a"]}, {"json_object": True}]),
        st.sampled_from([{}, {"json": ""}, {"json_object": False}, {"json": "{"}, {"regex": 5}, [], "x"])
        | st.sampled_from([{"regex": "a", "choice": ["a"]}, {"choice": []}, {"choice": [""]}, {"json": 5}])
        | st.sampled_from([{"regex": "a", "structural_tag": {}}]),
        "request",
    ),
    "guided_json": Field(
        st.sampled_from([{}, "{}", True]), st.sampled_from(["", "{", 5, [], False]), "request"
    ),
    "guided_regex": Field(st.just("a+"), no_text | st.just(""), "request"),
    "guided_choice": Field(
        st.lists(words, min_size=1, max_size=3), st.sampled_from([[], [""], "x", [5], {}]), "request"
    ),
    "guided_grammar": Field(st.just("start: /a/"), no_text | st.just(""), "request"),
    "seed": Field(st.integers(-(2**63), 2**63 - 1), outside(-(2**63), 2**63 - 1)),
    "stop": Field(stops | texts.filter(bool), lists_of_no_text | st.just([""]) | st.just("")),
    "stop_token_ids": Field(ids, st.lists(outside(0, 2**31 - 1), min_size=1, max_size=2) | st.integers()),
    "ignore_eos": Field(flags, no_flag),
    "include_stop_str_in_output": Field(flags, no_flag),
    "skip_special_tokens": Field(flags, no_flag),
    "prompt_logprobs": Field(st.integers(0, 20), outside(0, 20)),
    "truncate_prompt_tokens": Field(
        st.integers(1, 300) | st.just(-1), outside(-1, None) | st.just(0), "request"
    ),
    "stream": Field(flags, no_flag, "request"),
    "stream_options": Field(
        st.fixed_dictionaries({}, optional={"include_usage": flags, "continuous_usage_stats": flags}),
        st.fixed_dictionaries({"include_usage": no_flag}) | st.integers() | st.just([]) | st.just("x"),
        "request",
        beside=(("stream", True),),
    ),
    "stream_interval": Field(st.integers(1, 1000), outside(1, None), "request"),
    "return_token_ids": Field(flags, no_flag, "request"),
    "return_tokens_as_token_ids": Field(flags, no_flag, "request"),
    "priority": Field(st.integers(-(2**31), 2**31), outside(-(2**31), 2**31), "options"),
    "cache_salt": Field(words, no_text | st.just("") | st.just("x" * 1025), "options"),
    "request_id": Field(words, no_text | st.sampled_from(["", "a b", "a\n", "é", "x" * 129]), "request"),
}
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=3)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
GOOD_MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "developer", "user"]), "content": texts | PARTS},
            optional={"name": texts},
        ),
        st.just({"role": "assistant", "content": "x", "refusal": None, "audio": None, "function_call": None}),
        st.just({"role": "assistant", "content": None, "tool_calls": [CALL]}),
        st.just({"role": "tool", "content": "5", "tool_call_id": "c"}),
    ),
    min_size=1,
    max_size=4,
)
BAD_MESSAGES = st.one_of(
    st.just([]),
    st.text(max_size=3),
    st.integers(),
    st.just({}),
    st.lists(st.integers() | st.text(max_size=2) | st.just({}), min_size=1, max_size=2),
    st.sampled_from(
        [
            [{"role": "user"}],
            [{"role": "user", "content": None}],
            [{"role": "user", "content": 5}],
            [{"role": "user", "content": [5]}],
            [{"role": "user", "content": ["x"]}],
            [{"role": "user", "content": [{"type": "text"}]}],
            [{"role": "user", "content": [{"text": "x"}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
            [{"role": "narrator", "content": "x"}],
            [{"role": None, "content": "x"}],
            [{"role": "assistant"}],
            [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}],
            [{"role": "assistant", "content": "x", "audio": {"id": "a"}}],
            [{"role": "assistant", "tool_calls": [{}]}],
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}],
            [{"role": "assistant", "tool_calls": 5}],
        ]
    ),
)
CHAT = COMMON | {
    "messages": Field(GOOD_MESSAGES, BAD_MESSAGES, "request"),
    "max_tokens": Field(st.integers(1, 10**6), outside(1, 2**31 - 1)),
    "max_completion_tokens": Field(st.integers(1, 10**6), outside(1, None), name="max_tokens"),
    "logprobs": Field(flags, no_flag, "request"),
    "top_logprobs": Field(st.integers(0, 20), outside(0, 20), name="logprobs", beside=(("logprobs", True),)),
    "reasoning_effort": Field(st.nothing(), texts | no_text, "request"),
    "chat_template_kwargs": Field(
        st.dictionaries(words.map(lambda word: f"k{word}"), st.integers() | texts | st.none(), max_size=3),
        st.integers() | st.just([]) | st.just("x") | st.just({"messages": []}) | st.just({"tools": []}),
        "request",
    ),
    "add_generation_prompt": Field(flags, no_flag, "request"),
    "continue_final_message": Field(flags, no_flag, "request"),
    "chat_template": Field(st.nothing(), texts | no_text, "request"),
    "tools": Field(
        st.nothing(),
        st.lists(st.fixed_dictionaries({"type": words, "function": st.fixed_dictionaries({"name": words})}))
        | no_text,
        "request",
    ),
    "tool_choice": Field(
        st.just("none"), st.sampled_from(["auto", "required", {}]) | words | no_text, "request"
    ),
    "parallel_tool_calls": Field(flags, no_flag, "request"),
    "include_reasoning": Field(flags, no_flag, "request"),
}
COMPLETION = COMMON | {
    "prompt": Field(
        texts | ids | st.lists(texts, min_size=1, max_size=4) | st.lists(ids, min_size=1, max_size=4),
        st.one_of(
            st.integers(),
            st.booleans(),
            st.just({}),
            st.just([]),
            st.just([[]]),
            st.just([[], [1]]),
            st.just(["x", 5]),
            st.just([5, [5]]),
            st.lists(st.integers(320, 2**70) | st.integers(-(2**70), -1), min_size=1, max_size=3),
            st.lists(st.lists(st.integers(320, 999), min_size=1, max_size=2), min_size=1, max_size=2),
            st.lists(st.booleans() | st.floats(0.5, 1), min_size=1, max_size=2),
            st.just("x" * 300),
            st.just(["x" * 300, "y"]),
            st.just([7] * 256),
            st.just([7] * 5000),
            st.just([[7], [7] * 256]),
        ),
        "request",
    ),
    "max_completion_tokens": Field(st.integers(1, 10**6), outside(0, None), name="max_tokens"),
    "logprobs": Field(st.integers(0, 20), outside(0, 20)),
    "echo": Field(flags, no_flag, "request"),
    "add_special_tokens": Field(flags, no_flag, "request"),
}
TABLES = {ChatRequest: CHAT, CompletionRequest: COMPLETION}
BY_THE_MODEL = ("reasoning_effort", "chat_template", "tools")  # served where template or server allow it
EACH = [(kind, name) for kind, table in TABLES.items() for name in table]


def body_of(kind, name, value):
    """A body with that field, and what must stand beside it."""
    return {**BODIES[kind], **dict(TABLES[kind][name].beside), name: value}


def is_at(param, name):
    """Whether the param of an error is a field or a place in it."""
    return param is not None and (param == name or param.startswith((f"{name}.", f"{name}[")))


@pytest.mark.parametrize("kind", TABLES)
def test_these_are_all_fields_that_there_are(kind):
    assert {field.encode_name for field in msgspec.structs.fields(kind)} == set(TABLES[kind])


@pytest.mark.parametrize("kind, name", [(kind, name) for kind, name in EACH if name not in BY_THE_MODEL])
@given(data=st.data())
def test_a_field_becomes_what_it_promises(read, kind, name, data):
    field = TABLES[kind][name]
    value = data.draw(field.good)
    found = dict(
        zip(("request", "params", "options"), read(kind, body_of(kind, name, value))[:3], strict=True)
    )
    got = getattr(found[field.where], field.name or name)
    if field.where == "params":
        assert _plain(got) == _plain(value)
    elif name in FORMS:
        assert (found["request"].form is None) == (value == {"type": "text"})
    else:
        assert msgspec.to_builtins(got) == _as_request_has(name, value)


@pytest.mark.parametrize("kind, name", EACH)
@given(data=st.data())
def test_what_cannot_be_honoured_is_a_400_that_names_the_field(refused, kind, name, data):
    error = refused(kind, body_of(kind, name, data.draw(TABLES[kind][name].bad)))
    assert is_at(error.param, name), (error.param, error.message)
    assert error.message


@pytest.mark.parametrize("kind, name", EACH)
def test_null_is_a_field_that_is_absent(read, refused, kind, name):
    if name in BODIES[kind]:
        assert is_at(refused(kind, body_of(kind, name, None)).param, name)
    else:
        body = body_of(kind, name, None)
        assert read(kind, body) == read(kind, {key: item for key, item in body.items() if item is not None})


leaves = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
anything = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
)


@pytest.mark.parametrize("kind", TABLES)
@given(data=st.data())
def test_whatever_stands_anywhere_is_served_or_a_400(read, kind, data):
    names = st.sampled_from([*TABLES[kind], "tools", "suffix", "x"])
    body = {**BODIES[kind], **data.draw(st.dictionaries(names, anything, max_size=4))}
    error = _error_of(read, kind, body)
    if error is not None:
        assert error.status == 400
        assert error.param is None or any(is_at(error.param, name) for name in body), error.param
        json.loads(error.body())


def _error_of(read, kind, body):
    try:
        read(kind, body)
    except ApiError as error:
        return error
    return None


def _as_request_has(name, value):
    if name == "stream_options":
        return {**dict.fromkeys(StreamOptions.__struct_fields__, False), **value}
    if name == "messages":
        return [{key: item for key, item in message.items() if item is not None} for message in value]
    return value


def _plain(value):
    """A value as it compares: ids in order, keys of a bias as numbers."""
    if isinstance(value, dict):
        return {int(key): float(bias) for key, bias in value.items()}
    if isinstance(value, (list, tuple)):
        return sorted(set(value))
    if isinstance(value, str):
        return [value]
    return value if isinstance(value, bool) or not isinstance(value, float) else math.fsum([value])
