"""Tools and thinking as Anthropic's client asks for them: blocks, whole and streamed, are the same."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.runtime.engine.outputs import CompletionOutput, StreamDelta
from lamina.serving.protocol.usage import usage
from lamina.serving.streaming.message_events import MessageEvents, Writing
from lamina.serving.tools.partial_json import object_so_far

from .conftest import PARAMETERS
from .test_parsers import TEXTS, reader_of

TOOLS: Any = [
    {"name": "get_weather", "description": "d", "input_schema": PARAMETERS},
    {"name": "now", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
]
USER: Any = {"role": "user", "content": "hello"}
FIELDS: Any = {"model": "tiny", "messages": [USER], "max_tokens": 400}
GREEDY: Any = {**FIELDS, "extra_body": {"temperature": 0}, "tools": TOOLS}


@pytest.fixture(scope="module")
def client(tool_client: httpx.Client) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=str(tool_client.base_url), api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def thinker(thinking_client: httpx.Client) -> Iterator[anthropic.Anthropic]:
    url = str(thinking_client.base_url)
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def check_calls(message: Any, names: tuple[str, ...] = ("get_weather", "now")) -> None:
    assert message.stop_reason in ("tool_use", "max_tokens")
    if message.stop_reason == "max_tokens":
        return
    assert len({block.id for block in message.content}) == len(message.content) > 0
    for block in message.content:
        assert block.type == "tool_use"
        assert block.id.startswith("toolu_")
        assert block.name in names
        (schema,) = (tool["input_schema"] for tool in TOOLS if tool["name"] == block.name)
        jsonschema.validate(block.input, schema)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_that_is_required_is_a_block_whatever_is_drawn(
    client: anthropic.Anthropic, choice: Any
) -> None:
    names = (choice["name"],) if "name" in choice else ("get_weather", "now")
    reasons = []
    for _ in range(12):
        message = client.messages.create(
            **FIELDS, tools=TOOLS, tool_choice=choice, extra_body={"temperature": 1}
        )
        check_calls(message, names)
        assert choice["type"] == "any" or len(message.content) == 1
        reasons.append(message.stop_reason)
    assert "tool_use" in reasons


def test_a_stream_of_calls_is_the_whole_message(client: anthropic.Anthropic) -> None:
    fields = {**GREEDY, "tool_choice": {"type": "tool", "name": "get_weather"}}
    whole = client.messages.create(**fields)
    check_calls(whole)
    with client.messages.stream(**fields) as stream:
        events = [event for event in stream if event.type.startswith(("message", "content", "input"))]
        final = stream.get_final_message()
    assert (final.stop_reason, final.content[0].input) == (whole.stop_reason, whole.content[0].input)
    assert final.content[0].name == "get_weather"
    begun = next(event for event in events if event.type == "content_block_start")
    assert (begun.content_block.type, begun.content_block.input) == ("tool_use", {})
    pieces = [event.partial_json for event in events if event.type == "input_json"]
    assert json.loads("".join(pieces)) == whole.content[0].input
    assert len(pieces) > 1
    usages = [
        (each.usage.input_tokens + (each.usage.cache_read_input_tokens or 0)) for each in (whole, final)
    ]
    assert usages[0] == usages[1]


def test_parallel_calls_may_be_refused(client: anthropic.Anthropic) -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    for _ in range(12):
        message = client.messages.create(
            **FIELDS, tools=TOOLS, tool_choice=choice, extra_body={"temperature": 1}
        )
        check_calls(message)
        assert len(message.content) == 1


def test_prompts_with_tools_are_counted_and_none_leaves_them_out(client: anthropic.Anthropic) -> None:
    def count(**own: Any) -> int:
        return client.messages.count_tokens(model="tiny", messages=[USER], **own).input_tokens

    plain, offered = count(), count(tools=TOOLS)
    assert plain == count(tools=TOOLS, tool_choice={"type": "none"}) < offered
    used = client.messages.create(**{**GREEDY, "max_tokens": 2}).usage
    assert used.input_tokens + (used.cache_read_input_tokens or 0) == offered
    none: Any = {**GREEDY, "max_tokens": 8, "tool_choice": {"type": "none"}}
    assert [block.type for block in client.messages.create(**none).content] == ["text"]


def test_a_loop_of_calls_and_results_goes_on(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**{**GREEDY, "tool_choice": {"type": "tool", "name": "get_weather"}})
    (call,) = message.content
    results: Any = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "17 degrees"},
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "18"}]},
        {"type": "tool_result", "tool_use_id": call.id, "is_error": True},
        {"type": "text", "text": "and tomorrow?"},
    ]
    turns: Any = [
        USER,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    again = client.messages.create(**{**GREEDY, "messages": turns, "max_tokens": 8})
    assert again.stop_reason is not None
    plain = client.messages.count_tokens(model="tiny", messages=[USER]).input_tokens
    assert client.messages.count_tokens(model="tiny", messages=turns).input_tokens > plain + len("17 degrees")


def test_results_are_messages_of_their_own_in_their_order(tool_client: httpx.Client) -> None:
    from lamina.serving.protocol.decoding import decode
    from lamina.serving.protocol.messages import Conversation

    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"b": 1}},
        {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
    ]
    answers = [
        {"type": "text", "text": "x"},
        {"type": "tool_result", "tool_use_id": "t1", "content": "1"},
        {"type": "tool_result", "tool_use_id": "t2", "content": []},
        {"type": "text", "text": "y"},
    ]
    turns = [USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": answers}]
    body = json.dumps({"messages": [*turns, USER]}).encode()
    found = decode(Conversation, body).request.chat_messages()
    assert [message.role for message in found] == ["user", "assistant", "user", "tool", "tool", "user"]
    assert (found[1].content, found[1].reasoning_content) == ("a", "hm")
    calls = [(call.id, call.function.name, call.function.arguments) for call in found[1].tool_calls or ()]
    assert calls == [("t1", "f", {"b": 1}), ("t2", "g", {})]
    assert [message.content for message in found[2:]] == ["x", "1", "", "y\n\nhello"]
    assert [message.tool_call_id for message in found[3:5]] == ["t1", "t2"]


def test_what_the_model_reasons_is_a_block_of_thinking(thinker: anthropic.Anthropic) -> None:
    fields: Any = {**FIELDS, "max_tokens": 20, "extra_body": {"temperature": 0}}
    whole = thinker.messages.create(**fields)
    assert [block.type for block in whole.content] == ["thinking"]  # </think> is not drawn by chance
    with thinker.messages.stream(**fields) as stream:
        assert stream.get_final_message().content == whole.content
    enabled = thinker.messages.with_raw_response.create(
        **fields, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    assert enabled.headers["x-lamina-not-enforced"] == "thinking.budget_tokens"
    assert enabled.parse().content == whole.content
    off = thinker.messages.create(**fields, thinking={"type": "disabled"})
    assert [block.type for block in off.content] == ["text"]
    hidden = {
        **fields,
        "extra_body": {"temperature": 0, "thinking": {"type": "adaptive", "display": "omitted"}},
    }
    assert [(block.type, block.text) for block in thinker.messages.create(**hidden).content] == [("text", "")]


def test_a_required_call_follows_where_thinking_is_off(thinker: anthropic.Anthropic) -> None:
    fields: Any = {**FIELDS, "tools": TOOLS, "thinking": {"type": "disabled"}}
    check_calls(thinker.messages.create(**fields, tool_choice={"type": "any"}))


def schema(**own: Any) -> list[Any]:
    return [{"name": "f", "input_schema": {"type": "object", **own}}]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no tools to choose from": ({"tool_choice": {"type": "any"}}, "tool_choice is any"),
    "an unknown name": (
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}},
        "tool_choice.name is 'x'",
    ),
    "no chosen name": ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
    "another choice": ({"tools": TOOLS, "tool_choice": {"type": "required"}}, "tool_choice.type"),
    "a name twice": ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name"),
    "no name": ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
    "no schema": ({"tools": [{"name": "f"}]}, "tools[0]"),
    "a wrong type": ({"tools": schema(properties={"a": {"type": "txt"}})}, "tools[0].input_schema"),
    "no object": ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
    "a server's tool": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    "what cannot be enforced": (
        {"tools": schema(**{"not": {"propertyNames": {}}}), "tool_choice": {"type": "any"}},
        "not",
    ),
    "thinking": ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking is enabled"),
    "examples": ({"tools": [{**TOOLS[1], "input_examples": [{}]}]}, "tools[0].input_examples"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_offered_is_refused_in_the_clients_names(
    client: anthropic.Anthropic, case: str
) -> None:
    fields, named = REFUSED[case]
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.create(**FIELDS, extra_body={**fields, "stream": stream})
        error: Any = caught.value.body
        assert error["type"] == "error"
        assert named in error["error"]["message"]
        assert "function" not in error["error"]["message"]


def blocks_of(data: bytes) -> tuple[list[dict[str, Any]], str]:
    """The blocks that events tell of, as the client joins them, and why the message ended."""
    blocks: list[dict[str, Any]] = []
    inputs: list[str] = []
    is_open, reason = False, ""
    for event in data.decode().removesuffix("\n\n").split("\n\n"):
        name, _, content = event.partition("\ndata: ")
        told = json.loads(content)
        assert name == f"event: {told['type']}"
        if told["type"] == "content_block_start":
            assert not is_open
            assert told["index"] == len(blocks)
            is_open = True
            blocks.append(told["content_block"])
            inputs.append("")
        elif told["type"] == "content_block_delta":
            assert is_open
            assert told["index"] == len(blocks) - 1
            piece = told["delta"]
            if piece["type"] == "input_json_delta":
                inputs[-1] += piece["partial_json"]
                blocks[-1]["input"] = object_so_far(inputs[-1])
            else:
                field = piece["type"].removesuffix("_delta")
                blocks[-1][field] += piece[field]
        elif told["type"] == "content_block_stop":
            assert is_open
            assert told["index"] == len(blocks) - 1
            is_open = False
        elif told["type"] == "message_delta":
            assert not is_open
            reason = told["delta"]["stop_reason"]
    return blocks, reason


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in block.items() if key != "id"} for block in blocks]


@given(
    text=TEXTS,
    cuts=st.lists(st.integers(0, 100), max_size=8),
    form=st.sampled_from(["hermes", "llama3_json", "pythonic", "mistral_args", None]),
    reasoning=st.sampled_from(["think", None]),
    finish=st.sampled_from(["stop", "length"]),
)
def test_blocks_are_the_same_however_the_text_is_cut(
    text: str, cuts: list[int], form: str | None, reasoning: str | None, finish: Any
) -> None:
    writing = Writing(id="m", model="tiny", max_tokens=1, new_reader=lambda: reader_of(form, reasoning))
    used = usage(1, 1)
    answer = CompletionOutput(index=0, text=text, token_ids=(1,), finish_reason=finish)
    whole = writing.whole(answer, used)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)] or [""]
    deltas = [StreamDelta(request_id="r", index=0, text=piece, token_ids=()) for piece in pieces]
    deltas[-1].token_ids, deltas[-1].finish_reason = (1,), finish
    events = MessageEvents(writing, lambda _: used)
    data = b"".join(events.write([delta]) for delta in deltas) + events.end()
    blocks, reason = blocks_of(data)
    assert without_ids(blocks) == without_ids(whole["content"])
    assert reason == whole["stop_reason"]
    assert (reason == "tool_use") == (
        finish == "stop" and any(block["type"] == "tool_use" for block in blocks)
    )
