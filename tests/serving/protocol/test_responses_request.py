"""Every field of a response by its name: what it becomes, and that what else stands there is a named 400."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.serving.errors import ApiError
from lamina.serving.protocol.decoding import decode
from lamina.serving.protocol.responses import ResponsesRequest, renamed

from .test_fields import CHAT, Field, anything, is_at, no_text, outside, texts

AS_IN_CHATS = (
    *("model", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "chat_template_kwargs"),
    *("priority", "cache_salt", "stream", "stream_options"),
)
FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}
USER = {"role": "user", "content": "hello"}
SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
PARTS = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["input_text", "output_text"]), "text": texts}), max_size=3
)
ITEMS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant"]), "content": texts | PARTS},
        optional={"type": st.just("message"), "id": texts, "status": st.just("completed")},
    ),
    min_size=1,
    max_size=4,
)
BAD_ITEMS = [
    [],
    5,
    {},
    None,
    ["x"],
    [{}],
    [{"role": "user"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": 5}],
    [{"role": "tool", "content": "x"}],
    [{"role": "user", "content": ["x"]}],
    [{"role": "user", "content": [{"type": "input_text"}]}],
    [{"role": "user", "content": [{"text": "x"}]}],
    [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}],
    [{"role": "user", "content": [{"type": "input_file", "file_id": "a"}]}],
    [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
    [{"type": "function_call_output", "call_id": "a"}],
    [{"type": "function_call_output", "output": "5"}],
    [{"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]}],
    [{"type": "reasoning", "content": [{"type": "reasoning_text"}]}],
    [{"type": "function_call", "call_id": "a", "arguments": "{}"}],
    [{"type": "function_call", "call_id": "a", "name": "f"}],
    [USER, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}],
    [USER, {"type": "custom_tool_call", "call_id": "a", "name": "f", "input": "{}"}],
    [{"type": "item_reference", "id": "a"}],
    "x" * 300,
    [{**USER, "content": "x" * 300}],
]
TABLE = {name: CHAT[name] for name in AS_IN_CHATS} | {
    "input": Field(texts | ITEMS, st.sampled_from(BAD_ITEMS), "request"),
    "instructions": Field(texts, no_text, "request"),
    "previous_response_id": Field(texts, no_text, "request"),
    "store": Field(st.booleans(), st.sampled_from([0, 1, "true", [], {}]), "request"),
    "metadata": Field(
        st.dictionaries(texts, texts, max_size=3),
        st.sampled_from([5, "x", [], {"a": 5}, {"a": None}, {"a": "x" * 513}, {"k" * 65: "a"}])
        | st.just({str(number): "x" for number in range(17)}),
        "request",
    ),
    "text": Field(
        st.sampled_from([{}, {"format": {"type": "text"}}, {"format": {"type": "json_object"}}])
        | st.sampled_from([{"format": SCHEMA}, {"format": None, "verbosity": "medium"}]),
        st.sampled_from([5, "text", [], {"format": "text"}, {"format": {}}, {"format": {"type": "sound"}}])
        | st.sampled_from([{"format": {"type": "json_schema", "name": "x"}}, {"verbosity": "low"}])
        | st.just({"format": {"type": "json_schema", "schema": 5}}),
        "request",
    ),
    "reasoning": Field(
        st.sampled_from([{}, {"effort": None}, {"effort": None, "summary": None}]),
        st.sampled_from([5, "low", [], {"effort": 5}, {"effort": "low"}, {"summary": "auto"}]),
        "request",
    ),
    "tools": Field(
        st.sampled_from([[], [FUNCTION], [{"type": "function", "name": "f", "strict": True}]]),
        st.sampled_from([5, {}, ["x"], [{}], [{"type": "web_search"}], [{"type": "function"}]])
        | st.sampled_from([[FUNCTION, FUNCTION], [{**FUNCTION, "name": "a b"}]])
        | st.just([{**FUNCTION, "parameters": {"type": "array"}}]),
        "request",
        beside=(("tool_choice", "none"),),  # the template here reads none
    ),
    "tool_choice": Field(
        st.sampled_from(["none", "auto"]),
        st.sampled_from([5, "f", [], {}, "required", {"type": "function", "name": "f"}, {"type": "function"}])
        | st.sampled_from([{"type": "allowed_tools", "tools": []}, {"type": "file_search"}]),
        "request",
    ),
    "parallel_tool_calls": Field(st.booleans(), st.sampled_from([0, "x", []]), "request"),
    "max_output_tokens": Field(st.integers(1, 10**6), outside(1, 2**31 - 1), name="max_tokens"),
}


@pytest.fixture(scope="module")
def read_response(config, processor):
    """read_response(body) -> request, parameters, options: all that the route makes of a body alone."""

    def read(body, *, strict=False):
        request = decode(ResponsesRequest, json.dumps(body).encode(), strict=strict).request
        turns = request.turns()
        with renamed():
            chat = request.chat(turns)
            params, options = chat.sampling_params(config), chat.options()
            chat.prompt(processor, config)
        return request, params, options

    return read


@pytest.fixture(scope="module")
def refused_response(read_response):
    """refused_response(body) -> the 400 that a body is answered with."""

    def error_of(body, **options):
        with pytest.raises(ApiError) as caught:
            read_response(body, **options)
        assert caught.value.status == 400
        assert len(caught.value.body()) < 6000
        return caught.value

    return error_of


def body_of(name, value):
    return {"input": "hello", **dict(TABLE[name].beside), name: value}


def test_these_are_all_fields_that_there_are():
    assert {field.encode_name for field in msgspec.structs.fields(ResponsesRequest)} == set(TABLE)
    assert not set(TABLE) & (set(ResponsesRequest.unserved) | ResponsesRequest.accepted)


@pytest.mark.parametrize("name", TABLE)
@given(data=st.data())
def test_a_field_becomes_what_it_promises(read_response, name, data):
    field, body = TABLE[name], body_of(name, data.draw(TABLE[name].good))
    found = dict(zip(("request", "params", "options"), read_response(body), strict=True))
    got, value = getattr(found[field.where], field.name or name), body[name]
    if name in ("text", "reasoning", "input", "stream_options", "tools"):
        assert _holds(msgspec.to_builtins(got), value)
    elif name == "stop":
        assert set(got) == ({value} if isinstance(value, str) else set(value))
    else:
        assert got == value


def _holds(found, value):
    """Whether what was read has all that was given."""
    if isinstance(value, dict):
        return all(_holds(found.get(name), item) for name, item in value.items() if name != "verbosity")
    if isinstance(value, list):
        return all(_holds(one, other) for one, other in zip(found, value, strict=True))
    return found == value


@pytest.mark.parametrize("name", TABLE)
@given(data=st.data())
def test_what_cannot_be_honoured_is_a_400_that_names_the_field(refused_response, name, data):
    error = refused_response(body_of(name, data.draw(TABLE[name].bad)))
    assert is_at(error.param, name), (error.param, error.message)
    for other in ("max_tokens", "messages", "response_format", "reasoning_effort"):
        assert not error.message.startswith(other), error.message


@pytest.mark.parametrize("name", [name for name in TABLE if name != "input"])
def test_null_is_a_field_that_is_absent(read_response, name):
    body = body_of(name, None)
    assert read_response(body) == read_response({key: item for key, item in body.items() if item is not None})


@pytest.mark.parametrize("name", ResponsesRequest.unserved)
def test_what_is_not_served_is_refused_by_name_unless_it_asks_for_nothing(
    read_response, refused_response, name
):
    error = refused_response({"input": "hello", name: {"a": "value"}})
    assert (error.param, error.code) == (name, "unsupported_field")
    for nothing in (None, *ResponsesRequest.unserved[name].neutral):
        read_response({"input": "hello", name: nothing}, strict=True)


@pytest.mark.parametrize("name", sorted(ResponsesRequest.accepted))
def test_what_changes_no_answer_is_taken(read_response, name):
    read_response({"input": "hello", name: "anything"}, strict=True)


def test_an_output_item_of_the_server_is_read_without_a_field_left_over(read_response):
    part = {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    read_response({"input": [USER, item, USER]}, strict=True)


@given(data=st.data())
def test_whatever_stands_anywhere_is_served_or_a_400(read_response, data):
    names = st.sampled_from([*TABLE, "tools", "include", "x"])
    body = {"input": "hello", **data.draw(st.dictionaries(names, anything, max_size=4))}
    error = _error_of(read_response, body)
    if error is not None:
        assert error.status == 400
        assert error.param is None or any(is_at(error.param, name) for name in body), error.param
        json.loads(error.body())


def _error_of(read_response, body):
    try:
        read_response(body)
    except ApiError as error:
        return error
    return None


def test_items_of_one_answer_are_one_message():
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "5"}]}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
    said = {"role": "assistant", "content": "x"}
    items = [USER, thought, said, call, call, output, call, output, said, said, USER]
    body = json.dumps({"input": items}).encode()
    turns = decode(ResponsesRequest, body, strict=True).request.turns()
    assert [(turn.role, turn.content, len(turn.tool_calls or ())) for turn in turns] == [
        ("user", "hello", 0),
        ("assistant", "x", 2),
        ("tool", "5", 0),
        ("assistant", None, 1),
        ("tool", "5", 0),
        ("assistant", "x", 0),
        ("assistant", "x", 0),
        ("user", "hello", 0),
    ]
    assert [turn.reasoning_content for turn in turns] == [None, "t", *[None] * 6]
