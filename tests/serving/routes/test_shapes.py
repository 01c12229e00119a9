"""Answers over HTTP: successes have the fields that openapi.json promises, and refusals name theirs."""

import json

import msgspec
import pytest

from lamina.serving.protocol import response_models

from ..reading import events_of

USER = {"role": "user", "content": "hello"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES = {CHAT: {"messages": [USER], "max_tokens": 3}, COMPLETIONS: {"prompt": "hello", "max_tokens": 3}}
WHOLE = {CHAT: response_models.ChatCompletion, COMPLETIONS: response_models.Completion}
CHUNK = {CHAT: response_models.ChatChunk, COMPLETIONS: response_models.Completion}
LOGPROBS = {CHAT: {"logprobs": True, "top_logprobs": 2}, COMPLETIONS: {"logprobs": 2}}
VARIANTS = {
    "plain": {},
    "several": {"n": 3},
    "logprobs": {"logprobs": None},
    "ids": {"return_token_ids": True},
    "stopped": {"stop_token_ids": list(range(3, 100)), "temperature": 0},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_whole_answer_has_the_promised_fields_and_no_others(client, path, variant):
    extra = LOGPROBS[path] if variant == "logprobs" else VARIANTS[variant]
    answer = client.post(path, json={**BODIES[path], **extra, "prompt_logprobs": 1})
    assert answer.status_code == 200, answer.text
    found = msgspec.json.decode(answer.content, type=WHOLE[path])
    assert len(found.choices) == extra.get("n", 1)
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_event_of_a_stream_has_the_promised_fields_and_no_others(client, path, variant):
    extra = LOGPROBS[path] if variant == "logprobs" else VARIANTS[variant]
    body = {**BODIES[path], **extra, "stream": True, "stream_options": {"include_usage": True}}
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    *chunks, done = events_of(answer.content)
    assert done == "[DONE]"
    found = [msgspec.convert(chunk, CHUNK[path]) for chunk in chunks]
    assert found[-1].choices == []
    assert found[-1].usage.completion_tokens > 0


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/version", "/health", "/health/live"])
def test_what_the_server_says_of_itself_has_the_promised_fields(client, path):
    kinds = {
        "/v1/models": response_models.ModelList,
        "/v1/models/tiny": response_models.ModelEntry,
        "/version": response_models.Version,
        "/health": response_models.Ready,
        "/health/live": response_models.Live,
    }
    msgspec.json.decode(client.get(path).raise_for_status().content, type=kinds[path])


REFUSED = {
    "id beyond the vocabulary": ({"logit_bias": {"100000": 1}}, "logit_bias"),
    "bias that is no id": ({"logit_bias": {"abc": 1}}, "logit_bias"),
    "stop id beyond the vocabulary": ({"stop_token_ids": [100000]}, "stop_token_ids"),
    "allowed id beyond the vocabulary": ({"allowed_token_ids": [100000]}, "allowed_token_ids"),
    "answers without end": ({"n": 10**9}, "n"),
    "all logprobs of the prompt": ({"prompt_logprobs": -1}, "prompt_logprobs"),
    "a number as text": ({"temperature": "1"}, "temperature"),
    "a truth value as a number": ({"max_tokens": True}, "max_tokens"),
    "a schema that is none": ({"guided_json": {"properties": {"foo": "bar"}}}, "guided_json"),
    "an expression that is none": ({"structured_outputs": {"regex": "[unclosed"}}, "structured_outputs"),
    "two forms": ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex"),
    "a form without an end": ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    "a bad schema": ({"structured_outputs": {"json": ""}}, "structured_outputs"),
    "an unknown format": ({"response_format": {"type": "sound"}}, "response_format.type"),
    "no text": ({"skip_special_tokens": "no"}, "skip_special_tokens"),
    "an id of a request that breaks a header": ({"request_id": "a\r\nb: c"}, "request_id"),
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_the_field(client, path, case):
    fields, param = REFUSED[case]
    answer = client.post(path, json={**BODIES[path], **fields})
    error = msgspec.json.decode(answer.content, type=response_models.ErrorResponse).error
    assert answer.status_code == 400
    assert (error.type, error.param) == ("invalid_request_error", param)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("fields", [{"stream": True}, {}])
def test_what_is_refused_is_refused_before_a_stream_begins(client, path, fields):
    long = {CHAT: {"messages": [{**USER, "content": "x" * 999}]}, COMPLETIONS: {"prompt": "x" * 999}}[path]
    answer = client.post(path, json={**BODIES[path], **long, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "maximum context length" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "messages", [None, "x", [123], [{}], [], [{"role": "user", "content": [{"type": "x"}]}]]
)
def test_messages_that_are_none_are_a_400(client, messages):
    answer = client.post(CHAT, json={"messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("messages")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("body", [b"[]", b"null", b"\xff", b"", b'{"n":NaN}', b'{"a":1,"a":2}', b"[" * 9999])
def test_a_body_that_is_none_is_a_400_in_the_one_shape(client, path, body):
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    msgspec.json.decode(answer.content, type=response_models.ErrorResponse)


def test_ignored_fields_are_told_in_a_header_of_streams_too(client):
    for fields in ({}, {"stream": True}):
        answer = client.post(CHAT, json={**BODIES[CHAT], **fields, "made_up": 1, "user": "me"})
        assert answer.status_code == 200
        assert answer.headers["x-lamina-ignored-fields"] == "made_up"


def test_strict_fields_refuse_what_is_not_known(start_server):
    strict = start_server(strict_fields=True)
    answer = strict.client.post(CHAT, json={**BODIES[CHAT], "made_up": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "made_up"
    assert strict.client.post(CHAT, json={**BODIES[CHAT], "user": "me"}).status_code == 200
    strict.close()


def test_a_prompt_is_told_as_likely_as_the_library_finds_it(server):
    body = {"prompt": "hello the hello", "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    found = server.client.post(COMPLETIONS, json=body).raise_for_status().json()["choices"][0]
    logprobs = found["logprobs"]
    assert found["text"] == body["prompt"]
    assert logprobs["token_logprobs"][0] is None
    assert all(isinstance(number, float) for number in logprobs["token_logprobs"][1:])
    for number, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert max(top.values()) >= number
    again = server.client.post(COMPLETIONS, json={**body, "max_tokens": 1}).json()["choices"][0]["logprobs"]
    assert again["token_logprobs"][:-1] == logprobs["token_logprobs"]
    last = again["top_logprobs"][-1]
    assert max(last.values()) == again["token_logprobs"][-1]
    json.dumps(logprobs, allow_nan=False)
