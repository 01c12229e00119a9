"""Tools and reasoning in responses: items of their own, the same streamed as whole, and read as input."""

import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from .conftest import PARAMETERS, TOOLS

RESPONSES = "/v1/responses"
FUNCTIONS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
NAMED = {"type": "function", "name": "get_weather"}
ASKED: dict[str, Any] = {"input": "hello", "tools": FUNCTIONS, "max_output_tokens": 400, "temperature": 1}


def ask(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = client.post(RESPONSES, json={**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events_of(client: httpx.Client, **fields: Any) -> list[Any]:
    """The events of a response as OpenAI's client reads them, held to its own types."""
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as own:
        extra = {name: fields.pop(name) for name in ("seed", "chat_template_kwargs") if name in fields}
        asked: Any = {**ASKED, **fields, "extra_body": extra}
        events = list(own.responses.create(model="tiny", stream=True, **asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        type(event).model_validate(event.to_dict(), strict=True)
    return events


def joined(events: list[Any]) -> list[dict[str, Any]]:
    """The items that the events of a stream add up to, as the last event has them."""
    items: list[dict[str, Any]] = []
    for event in events:
        if event.type == "response.output_item.added":
            assert event.output_index == len(items)
            items.append({"item": event.item, "text": ""})
        elif event.type.endswith(".delta"):
            assert event.output_index == len(items) - 1
            assert event.item_id == items[-1]["item"].id
            items[-1]["text"] += event.delta
        elif event.type == "response.output_item.done":
            items[-1]["item"] = event.item
    final = events[-1].response.to_dict()["output"]
    assert [each["item"].to_dict() for each in items] == final
    for each, item in zip(items, final, strict=True):
        assert each["text"] == text_of(item)
    return [plain(item) for item in final]


def text_of(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    return "".join(part["text"] for part in item["content"])


def plain(item: dict[str, Any]) -> dict[str, Any]:
    """An item but for the ids that were made for it."""
    assert item["id"]
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_is_required_parses(tool_client: httpx.Client, choice: Any) -> None:
    num_calls = 0
    for seed in range(12):
        response = ask(tool_client, tool_choice=choice, seed=seed)
        assert response["tools"] == FUNCTIONS
        assert response["tool_choice"] == choice
        if response["status"] == "completed":
            for call in response["output"]:
                assert call["type"] == "function_call"
                assert call["call_id"].startswith("call_")
                is_now = call["name"] == "now"
                assert not is_now or choice == "required"
                jsonschema.validate(json.loads(call["arguments"]), {} if is_now else PARAMETERS)
                num_calls += 1
    assert num_calls >= 8


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_of_calls_says_what_the_whole_response_says(tool_client: httpx.Client, seed: int) -> None:
    for fields in ({"tool_choice": "required"}, {"max_output_tokens": 12}):
        response = ask(tool_client, seed=seed, **fields)
        assert joined(events_of(tool_client, seed=seed, **fields)) == list(map(plain, response["output"]))


def completed_call(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    for seed in range(20):
        response = ask(client, tool_choice=NAMED, seed=seed, **fields)
        if response["status"] == "completed":
            return response
    raise AssertionError("no call is drawn to its end")


def test_calls_and_their_outputs_are_read_as_a_chat_reads_them(tool_client: httpx.Client) -> None:
    first = completed_call(tool_client, store=True)
    (call,) = first["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    greedy = {"max_output_tokens": 8, "temperature": 0, "tool_choice": "none"}
    by_items = ask(tool_client, input=[{"role": "user", "content": "hello"}, call, output], **greedy)
    went_on = ask(tool_client, input=[output], previous_response_id=first["id"], **greedy)
    called = {"name": call["name"], "arguments": call["arguments"]}
    messages = [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "tool_calls": [{"id": call["call_id"], "type": "function", "function": called}],
        },
        {"role": "tool", "tool_call_id": call["call_id"], "content": "rain"},
    ]
    chat = tool_client.post(
        "/v1/chat/completions", json={"messages": messages, "max_tokens": 8, "temperature": 0}
    ).json()
    for response in (by_items, went_on):
        assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
        assert text_of(response["output"][0]) == chat["choices"][0]["message"]["content"]


def test_reasoning_is_an_item_before_the_message(thinking_client: httpx.Client) -> None:
    asked = {"tools": None, "max_output_tokens": 20, "seed": 1}
    response = ask(thinking_client, **asked)
    assert [item["type"] for item in response["output"]] == ["reasoning"]  # </think> is not drawn by chance
    assert joined(events_of(thinking_client, **{**asked, "tools": []})) == list(
        map(plain, response["output"])
    )
    off = ask(thinking_client, **asked, chat_template_kwargs={"enable_thinking": False})
    assert [item["type"] for item in off["output"]] == ["message"]
    items = [{"role": "user", "content": "hello"}, *response["output"], {"role": "user", "content": "low"}]
    assert ask(thinking_client, **{**asked, "input": items})["status"] == "incomplete"


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"tools": [{**FUNCTIONS[0], "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**FUNCTIONS[0], "parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        (
            {
                "tools": [{**FUNCTIONS[0], "parameters": {"properties": {"a": {"contains": {}}}}}],
                "tool_choice": "required",
            },
            "tools[0].parameters",
        ),
    ],
)
def test_a_refusal_names_the_field_of_responses(
    tool_client: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    answer = tool_client.post(RESPONSES, json={**ASKED, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert ".function" not in answer.json()["error"]["message"]
