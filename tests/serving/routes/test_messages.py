"""Anthropic's Messages API as it stands on the wire: shapes, events, and what is refused."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from lamina.serving.protocol.messages import MessageErrorResponse, MessageResponse, TokenCount

TURN = {"role": "user", "content": "hello"}
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0, "messages": [TURN]}
HEADERS = {"x-api-key": "none", "anthropic-version": "2023-06-01"}


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The name and the data of each event; every event has both."""
    events = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def test_a_message_has_the_shape_that_is_promised(client: httpx.Client) -> None:
    answer = client.post("/v1/messages", json=ASKED, headers=HEADERS).raise_for_status().json()
    message = msgspec.convert(answer, MessageResponse)
    assert message.id.startswith("msg_")
    assert message.usage.output_tokens == 8
    asked = {"messages": [TURN], "system": "be brief"}
    counted = client.post("/v1/messages/count_tokens", json=asked).raise_for_status().json()
    assert msgspec.convert(counted, TokenCount).input_tokens > message.usage.input_tokens


def test_a_stream_tells_the_same_message_event_by_event(client: httpx.Client) -> None:
    whole = client.post("/v1/messages", json=ASKED).json()
    answer = client.post("/v1/messages", json={**ASKED, "stream": True}).raise_for_status()
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    message = events[0][1]["message"]
    assert message["stop_reason"] is None
    assert message["content"] == []
    text = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    assert text == whole["content"][0]["text"]
    last = events[-2][1]
    assert last["delta"] == {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    assert last["usage"]["output_tokens"] == 8


def test_neighbours_of_one_role_are_one_turn(client: httpx.Client) -> None:
    split = [
        TURN,
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    joined = [{"role": "user", "content": "hello\n\nab"}]
    counts = [
        client.post("/v1/messages/count_tokens", json={"messages": each}).json() for each in (split, joined)
    ]
    assert counts[0] == counts[1]


def test_a_prompt_beyond_the_context_is_counted(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "é" * 5000}]
    assert (
        client.post("/v1/messages/count_tokens", json={"messages": messages}).json()["input_tokens"] > 10_000
    )
    answer = client.post("/v1/messages", json={**ASKED, "messages": messages})
    assert answer.status_code == 400
    assert "maximum context length" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"messages": None},
        {"messages": "hello"},
        {"messages": [5]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"content": "a"}]},
        {"messages": [{"role": "tool", "content": "a"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [{"text": "a"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}, TURN]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}, TURN]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}, TURN]},
        {
            "messages": [
                TURN,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]},
            ]
        },
        {"system": 5},
        {"system": [{"type": "image"}]},
        {"max_tokens": None},
        {"max_tokens": "8"},
        {"max_tokens": -1},
        {"max_tokens": 10**30},
        {"temperature": "hot"},
        {"top_p": 2},
        {"top_k": -5},
        {"stop_sequences": "a"},
        {"stop_sequences": [""]},
        {"stop_sequences": ["a"] * 1000},
        {"stream": "yes"},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool"}},
        {"tool_choice": {"type": "tool", "name": "f"}},
        {"tool_choice": "auto"},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"type": "enabled", "budget_tokens": -1}},
        {"output_config": {"effort": "low"}},
        {"mcp_servers": [{"url": "http://a"}]},
    ],
)
def test_what_is_wrong_is_refused_in_anthropics_shape(client: httpx.Client, change: dict[str, Any]) -> None:
    answer = client.post("/v1/messages", json={**ASKED, **change})
    assert answer.status_code == 400, answer.text
    error = msgspec.convert(answer.json(), MessageErrorResponse).error
    assert error.type == "invalid_request_error"
    assert next(iter(change)) in error.message


def test_an_answer_keeps_to_a_schema(client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    asked = {
        **ASKED,
        "max_tokens": 100,
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    }
    answer = client.post("/v1/messages", json=asked)
    assert answer.status_code == 200, answer.text
    message = answer.json()
    if message["stop_reason"] == "end_turn":
        assert json.loads(message["content"][0]["text"])["a"] in ("x", "y")
    else:  # blanks without end, which JSON allows
        assert message["content"][0]["text"].lstrip().startswith("{")
    events = events_of(client.post("/v1/messages", json={**asked, "stream": True}).text)
    text = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    assert text == message["content"][0]["text"]
    for wrong in (
        {"type": "json_object"},
        {"type": "json_schema"},
        {"type": "json_schema", "schema": {"type": 5}},
    ):
        refused = client.post("/v1/messages", json={**ASKED, "output_config": {"format": wrong}})
        assert refused.status_code == 400
        assert refused.json()["type"] == "error"


def test_what_asks_for_nothing_is_taken(client: httpx.Client) -> None:
    nothing = {
        "tools": [],
        "tool_choice": {"type": "none"},
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "a"},
        "service_tier": "auto",
        "stop_sequences": [],
    }
    blocks = [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}, "citations": None}]
    answer = client.post(
        "/v1/messages", json={**ASKED, **nothing, "messages": [{"role": "user", "content": blocks}]}
    )
    assert answer.status_code == 200, answer.text
    assert "x-lamina-ignored-fields" not in answer.headers
    assert answer.json()["content"] == client.post("/v1/messages", json=ASKED).json()["content"]


def test_every_refusal_below_the_route_has_anthropics_shape(
    start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAMINA_API_KEY", "sk-secret-of-some-length-0123456789")
    running = start_server(max_body_bytes=1000, root_path="/under")
    key = {"x-api-key": "sk-secret-of-some-length-0123456789"}
    cases = [
        ({}, {"json": ASKED}, 401, "authentication_error"),
        (key, {"json": {**ASKED, "system": "a" * 2000}}, 413, "request_too_large"),
        (
            key,
            {"content": b"a", "headers": {**key, "content-type": "text/plain"}},
            415,
            "invalid_request_error",
        ),
        (key, {"json": {**ASKED, "model": "another"}}, 404, "not_found_error"),
    ]
    for headers, asked, status, kind in cases:
        for base in (running.url, running.url.removesuffix("/under")):
            answer = running.client.post(f"{base}/v1/messages", **{"headers": headers, **asked})
            assert answer.status_code == status, answer.text
            assert msgspec.convert(answer.json(), MessageErrorResponse).error.type == kind
    assert running.client.get("/v1/messages", headers=key).json()["type"] == "error"
    answer = running.client.post("/v1/messages", json=ASKED, headers=key)
    assert answer.status_code == 200, answer.text
    running.close()
