"""Tools as clients ask for them: OpenAI's own, whole and streamed, and the shape of LangChain's requests."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from .conftest import TOOLS

MESSAGES: Any = [{"role": "user", "content": "hello"}]
FIELDS: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 300, "temperature": 0}


@pytest.fixture(scope="module")
def openai_client(tool_client: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tool_client.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_stream_of_calls_is_the_whole_answer(openai_client: openai.OpenAI) -> None:
    fields = FIELDS | {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    whole = openai_client.chat.completions.create(**fields).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    (call,) = whole.message.tool_calls or ()
    assert call.type == "function"
    pieces = [chunk.choices[0] for chunk in openai_client.chat.completions.create(**fields, stream=True)]
    calls = [piece for choice in pieces for piece in choice.delta.tool_calls or ()]
    assert calls[0].id
    assert all(piece.id is None for piece in calls[1:])
    assert calls[0].function.name == call.function.name == "get_weather"
    assert "".join(piece.function.arguments or "" for piece in calls) == call.function.arguments
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    assert pieces[-1].finish_reason == "tool_calls"


def test_the_stream_helper_builds_the_calls(openai_client: openai.OpenAI) -> None:
    fields = FIELDS | {"tool_choice": {"type": "function", "function": {"name": "now"}}}
    with openai_client.chat.completions.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    (call,) = final.message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("now", "{}")
    assert final.finish_reason == "tool_calls"
    assert any(event.type == "tool_calls.function.arguments.done" for event in events)


def test_a_loop_of_calls_and_results_goes_on(openai_client: openai.OpenAI) -> None:
    first = openai_client.chat.completions.create(**FIELDS, tool_choice="required", seed=1)
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "17"} for call in message.tool_calls or ()
    ]
    again: Any = FIELDS | {"messages": [*MESSAGES, message, *results], "max_tokens": 8}
    assert openai_client.chat.completions.create(**again).choices[0].finish_reason is not None


@pytest.mark.parametrize("stream", [False, True])
def test_what_langchain_sends_is_taken(tool_client: httpx.Client, stream: bool) -> None:
    """bind_tools(strict=True, tool_choice="any") of langchain-openai, with its history."""
    function = {**TOOLS[0]["function"], "strict": True}
    earlier = {"type": "function", "id": "call_1", "function": {"name": "now", "arguments": "{}"}}
    body = {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": None, "tool_calls": [earlier]},
            {"role": "tool", "content": "12:00", "tool_call_id": "call_1"},
        ],
        "max_completion_tokens": 200,
        "parallel_tool_calls": False,
        "stream": stream,
        "tool_choice": "required",
        "tools": [{"type": "function", "function": function}],
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }
    answer = tool_client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert "x-lamina-ignored-fields" not in answer.headers
