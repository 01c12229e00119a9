"""Answers over HTTP in the form that was asked for, by each of the names that clients use."""

import json
import re
from itertools import islice

import pytest

from ..reading import CHAT, COMPLETIONS, choices_of, streamed, whole

USER = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
SCHEMA["additionalProperties"] = False
IN_FORM = {
    "response_format schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "structured_outputs json": {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    "guided_json": {"guided_json": json.dumps(SCHEMA)},
}
FIELDS = {"max_tokens": 100, "temperature": 0}


def text_of(client, **fields):
    answer = client.post("/v1/chat/completions", json={"messages": [USER], **FIELDS, **fields})
    assert answer.status_code == 200, answer.text
    assert "x-lamina-ignored-fields" not in answer.headers
    return answer.json()["choices"][0]


@pytest.mark.parametrize("name", IN_FORM)
def test_a_schema_is_kept_to_by_whatever_name(client, name):
    choice = text_of(client, **IN_FORM[name])
    if choice["finish_reason"] == "stop":  # else it is blanks without end
        assert isinstance(json.loads(choice["message"]["content"])["a"], bool)
    else:
        assert name != "structured_outputs json"


def test_expressions_choices_and_grammars_are_kept_to(client):
    assert re.fullmatch("ab{2,4}", text_of(client, guided_regex="ab{2,4}")["message"]["content"])
    assert text_of(client, guided_choice=["yes", "no"])["message"]["content"] in ("yes", "no")
    grammar = {"structured_outputs": {"grammar": 'start: "x" "y"'}}
    assert text_of(client, **grammar)["message"]["content"] == "xy"


@pytest.mark.parametrize("schema", [True, "true", {}, "{}"])
def test_a_schema_that_accepts_anything_is_any_json(client, schema):
    fields = {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}
    choice = text_of(client, **fields)
    if choice["finish_reason"] == "stop":
        json.loads(choice["message"]["content"])


def test_a_stream_keeps_to_the_form_too(client):
    fields = {**FIELDS, "guided_choice": ["yes", "no"]}
    events = streamed(client, "/v1/completions", prompt="hello", **fields)
    assert choices_of(events)[0].text in ("yes", "no")


def test_text_is_any_text(client):
    free = text_of(client, max_tokens=5)["message"]["content"]
    assert text_of(client, max_tokens=5, response_format={"type": "text"})["message"]["content"] == free


def test_a_form_that_cannot_be_enforced_is_a_400_and_others_go_on(client):
    bad = {"guided_json": {"type": "array", "contains": {"type": "string"}}}
    answer = client.post("/v1/completions", json={"prompt": "hello", **bad})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "guided_json"
    assert client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1}).status_code == 200


def test_what_is_left_out_on_demand_is_told(client):
    schema = {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 1}, "maxItems": 2}
    form = {"json": schema, "lenient": True}
    answer = client.post("/v1/completions", json={"prompt": "x", "structured_outputs": form, "max_tokens": 9})
    assert answer.status_code == 200
    assert "contains" in answer.headers["X-Lamina-Not-Enforced"]


@pytest.mark.parametrize("seed", range(8))
def test_a_pattern_and_a_length_hold_together(client, seed):
    schema = {"type": "string", "pattern": "^a{1,9}$", "maxLength": 4}
    choice = text_of(client, guided_json=schema, temperature=1, seed=seed)
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch("a{1,4}", json.loads(choice["message"]["content"]))


def test_an_answer_given_up_in_the_middle_leaves_the_next_as_it_is_alone(client):
    schema = {"type": "array", "minItems": 30, "maxItems": 30, "items": {"enum": [12345, 67]}}
    form = {"json": schema, "disable_any_whitespace": True}
    body = {"prompt": "x", "structured_outputs": form, "max_tokens": 200, "temperature": 1, "seed": 5}
    alone = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert len(json.loads(alone)) == 30
    for count in (1, 7, 20):
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = response.iter_lines()
            given_up = list(islice(lines, 2 * count))
        events = [json.loads(line.removeprefix("data: ")) for line in given_up if line]
        assert alone.startswith("".join(event["choices"][0]["text"] for event in events))
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == alone


def alternatives(depth):
    """A schema of alternatives, each of alternatives."""
    return {"oneOf": [alternatives(depth - 1)] * 3} if depth else {"type": "string"}


HOSTILE = {
    "alternatives of alternatives": {"json": alternatives(7)},
    "an ambiguous grammar": {"grammar": 'start: a\na: a a | "x"'},
    "a bound of a hundred digits": {"json": {"type": "integer", "minimum": -(10**100)}},
    "a reference elsewhere": {"json": {"$ref": "file:///etc/passwd"}},
    "a power of repetitions": {"regex": "((a{1,100}){1,100}){1,100}"},
    "backtracking": {"regex": "(a+)+b"},
    "a wide choice": {"json": {"enum": [f"value {number}" for number in range(5000)]}},
    "deep lists": {"json": '{"items":' * 500 + "{}" + "}" * 500},
    "itself": {"json": {"$ref": "#"}},
    "a long text": {"json": {"type": "string", "maxLength": 1000000}},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_forms_are_served_or_refused(client, case):
    body = {"prompt": "x", "structured_outputs": HOSTILE[case], "max_tokens": 3}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code in (200, 400), answer.text
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


FORCED = {"structured_outputs": {"regex": "[ab]once upon a time[cd]"}, "max_tokens": 60, "temperature": 1}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_log_probabilities_beside_a_form_are_numbers_one_a_token_whole_and_streamed(client, path):
    """A mask leaves out nearly all tokens: JSON has no word for what is left of them."""
    own = {"messages": [USER], "logprobs": True, "top_logprobs": 5}
    own = own if path == CHAT else {"prompt": "hello", "logprobs": 5}
    body = {**FORCED, **own, "n": 2, "seed": 4, "return_token_ids": True}
    streams = choices_of(streamed(client, path, **body))
    for choice in whole(client, path, **body)["choices"]:
        found = choice["logprobs"]
        flat = [each["logprob"] for each in found["content"]] if path == CHAT else found["token_logprobs"]
        assert len(flat) == len(choice["token_ids"]) > 17
        assert all(isinstance(value, float) and -10_000 <= value <= 0 for value in flat)
        other = streams[choice["index"]]
        assert other.text == choice.get("text", choice.get("message", {}).get("content"))
        assert other.token_ids == choice["token_ids"]
        assert len(other.logprobs["content" if path == CHAT else "token_logprobs"]) == len(flat)


def test_forced_tokens_are_in_usage_and_in_metrics(server, client):
    def counted():
        server.serving.metrics_page._engines["tiny", 0]._read_at = float(
            "-inf"
        )  # else it may be a second old
        lines = client.get("/metrics").text.splitlines()
        (value,) = (line.split()[-1] for line in lines if line.startswith("lamina:num_forced_tokens_total{"))
        return float(value)

    server.comes_to_rest()
    before = counted()
    answer = whole(client, COMPLETIONS, prompt="hello", **FORCED)
    assert re.fullmatch("[ab]once upon a time[cd]", answer["choices"][0]["text"])
    num_tokens = answer["usage"]["completion_tokens"]
    assert 15 < num_tokens <= 19
    server.comes_to_rest()
    assert num_tokens - 4 <= counted() - before < num_tokens


@pytest.mark.parametrize(
    "field, value", [("ignore_eos", True), ("use_beam_search", True), ("allowed_token_ids", [100])]
)
def test_what_cannot_be_beside_a_form_is_a_400_that_says_so(client, field, value):
    answer = client.post(COMPLETIONS, json={"prompt": "hello", **FORCED, field: value})
    assert answer.status_code == 400, answer.text
    assert field in answer.text


def test_a_stop_string_within_what_is_forced_ends_a_stream_there(client):
    events = streamed(client, COMPLETIONS, prompt="hello", **FORCED, stop=["upon"])
    choice = choices_of(events)[0]
    assert re.fullmatch("[ab]once ", choice.text)
    assert (choice.reasons, choice.stop_reason) == (["stop"], "upon")
