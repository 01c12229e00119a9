"""A streamed response says what the whole one says, however it ends, and leaves nothing behind."""

import json
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.serving.protocol.response_objects import ResponseEvent, ResponseObject

RESPONSES = "/v1/responses"
LONG = {"input": "hello", "max_output_tokens": 200, "ignore_eos": True}
NEW = ("id", "created_at", "completed_at", "output")  # of a response, whatever is the same


def whole(client, **body):
    """A response as a whole, as what is promised."""
    answer = client.post(RESPONSES, json=body)
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=ResponseObject)


def streamed(client, **body):
    """The events of a response, each of them named as its data say, numbered, and of ASCII."""
    answer = client.post(RESPONSES, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.content.isascii()
    *parts, rest = answer.text.split("\n\n")
    assert rest == ""
    events = []
    for part in parts:
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert msgspec.convert(events[-1], ResponseEvent).type == name.removeprefix("event: ")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def told(events):
    """The response that a stream ends with, having held all its events to it."""
    created, in_progress, added, part, *deltas, text, part_done, item, last = events
    final = msgspec.convert(last["response"], ResponseObject)
    assert created["response"] == in_progress["response"]
    begun = msgspec.convert(created["response"], ResponseObject)
    assert (begun.id, begun.status, begun.output, begun.usage) == (final.id, "in_progress", [], None)
    (message,) = last["response"]["output"]
    assert item["item"] == message
    assert added["item"] == {**message, "status": "in_progress", "content": []}
    assert part_done["part"] == message["content"][0]
    assert part["part"] == {**part_done["part"], "text": ""}
    assert {event["item_id"] for event in (part, *deltas, text, part_done)} == {message["id"]}
    assert "".join(event["delta"] for event in deltas) == text["text"] == message["content"][0]["text"]
    assert all(event["delta"] for event in deltas)
    return final


def plain(response):
    """A response but for what differs from one time to the next."""
    fields = msgspec.to_builtins(response)
    fields["usage"].pop("input_tokens_details")  # a second prompt is in the prefix cache
    texts = [part["text"] for item in fields["output"] for part in item["content"]]
    statuses = [item["status"] for item in fields["output"]]
    return {name: item for name, item in fields.items() if name not in NEW}, texts, statuses


@settings(max_examples=25)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=1, max_size=3),
    fields=st.fixed_dictionaries(
        {"seed": st.integers(0, 2**31), "max_output_tokens": st.integers(1, 24)},
        optional={
            "instructions": st.text("be rif", max_size=5),
            "temperature": st.sampled_from([0, 0.5, 1.0]),
            "top_p": st.sampled_from([0.3, 1]),
            "top_k": st.integers(1, 50),
            "presence_penalty": st.sampled_from([-1.0, 0.5]),
            "stop": st.lists(st.text("etao \n", min_size=1, max_size=2), max_size=3),
            "ignore_eos": st.booleans(),
            "metadata": st.dictionaries(st.text("ab", max_size=2), st.text(max_size=3), max_size=2),
            "store": st.booleans(),
        },
    ),
)
def test_a_response_is_the_same_streamed(client, texts, fields):
    roles = ("user", "assistant", "user")
    items = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    expected = whole(client, input=items, **fields)
    final = told(streamed(client, input=items, **fields))
    assert plain(final) == plain(expected)
    assert expected.status in ("completed", "incomplete")
    assert (expected.incomplete_details is None) == (expected.status == "completed")
    if fields.get("store"):
        kept = client.get(f"{RESPONSES}/{final.id}").raise_for_status()
        assert msgspec.json.decode(kept.content, type=ResponseObject) == final


def test_characters_of_several_tokens_arrive_whole(scripted_server, bbpe_tokenizer):
    text = "a😀b👩‍👩‍👧é\u2028end"
    server = scripted_server([*([1] * 40), *bbpe_tokenizer().encode(text, add_special_tokens=False), 2])
    prompt = {"input": "a", "temperature": 0}
    final = told(streamed(server.client, **prompt))
    assert plain(final) == plain(whole(server.client, **prompt))


def test_an_error_after_the_first_byte_fails_the_response(scripted_server):
    logits = [[0.0] * 320 for _ in range(120)]
    for row in logits:
        row[40] = 9.0
    logits[119] = [float("nan")] * 320
    server = scripted_server(logits)
    body = {"input": "a", "temperature": 0, "ignore_eos": True, "store": True}
    events = streamed(server.client, **body)
    assert events[0]["type"] == "response.created"
    failed = msgspec.convert(events[-1]["response"], ResponseObject)
    assert (events[-1]["type"], failed.status) == ("response.failed", "failed")
    assert failed.error.message
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert failed.output[0].content[0].text == text
    kept = server.client.get(f"{RESPONSES}/{failed.id}").raise_for_status()
    assert msgspec.json.decode(kept.content, type=ResponseObject) == failed
    refused = server.client.post(RESPONSES, json=body)
    assert (refused.status_code, set(refused.json())) == (500, {"error"})
    server.comes_to_rest()
    assert not server.serving.responses.num_running


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_a_client_that_goes_leaves_nothing(server, raw, streams, reset):
    rng = random.Random(f"{streams}{reset}")
    with server.held() as engine:  # no request can end but by its client
        for number in range(12):
            connection = raw(server, RESPONSES, **LONG, stream=streams, store=number % 2 == 0)
            engine.begin(1)
            if streams:
                connection.read(rng.choice([1, 200]))
                engine.let(rng.choice([1, 5, 20]))
            connection.close(reset=reset)
            engine.wait_for(0)
        server.comes_to_rest()
    assert not server.serving.responses.num_running


def test_a_response_that_is_not_done_in_its_time_fails(server):
    with server.held():
        answer = server.client.post(RESPONSES, json=LONG, headers={"x-request-timeout": "0.001"})
    assert answer.status_code == 408
    server.comes_to_rest()
    assert not server.serving.responses.num_running


@pytest.mark.parametrize(
    "body, param, code",
    [
        ({"input": "x" * 999}, "input", "context_length_exceeded"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type", None),
        ({"input": "a", "background": True}, "background", "unsupported_field"),
        ({"input": "a", "previous_response_id": "x"}, "previous_response_id", "previous_response_not_found"),
        ({"input": "a", "reasoning": {"effort": "high"}}, "reasoning.effort", None),
        ({"input": "a", "max_output_tokens": 2**40}, "max_output_tokens", None),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format.schema",
            None,
        ),
        (
            {
                "input": "a",
                "text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}},
            },
            "text.format",
            None,
        ),
    ],
)
@pytest.mark.parametrize("streams", [True, False])
def test_a_refusal_names_the_field_before_a_stream_begins(client, body, param, code, streams):
    answer = client.post(RESPONSES, json={**body, "stream": streams})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_a_stored_response_is_not_streamed_again(client):
    response = whole(client, input="a", max_output_tokens=1, store=True)
    answer = client.get(f"{RESPONSES}/{response.id}", params={"stream": "true"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
    deleted = client.delete(f"{RESPONSES}/{response.id}")
    assert deleted.json() == {"id": response.id, "object": "response", "deleted": True}
    assert client.delete(f"{RESPONSES}/{response.id}").status_code == 404


def test_a_conversation_goes_on_and_on(client):
    """The messages of all responses before come before, so that the prompt begins as the last one did."""
    before, num_tokens = None, 0
    for text in ("hello", "low", "he"):
        response = whole(
            client, input=text, max_output_tokens=3, temperature=0, store=True, previous_response_id=before
        )
        assert response.usage.input_tokens > num_tokens
        before, num_tokens = response.id, response.usage.total_tokens


def test_a_server_without_room_stores_nothing(start_server):
    server = start_server(max_stored_bytes=0)
    assert whole(server.client, input="a", max_output_tokens=1).status == "incomplete"
    answer = server.client.post(RESPONSES, json={"input": "a", "max_output_tokens": 1, "store": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "store")
    server.close()
