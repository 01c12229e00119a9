"""Tools over HTTP with a real model: calls that are required parse, whatever is drawn, streamed or not."""

import json

import jsonschema
import pytest

from lamina.common.errors import ConfigError
from lamina.serving.tools.formats import FORMATS

from ..reading import streamed
from .conftest import BODY, PARAMETERS, TOOLS

USER = {"role": "user", "content": "hello"}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def ask(client, **fields):
    body = {"messages": [USER], "tools": TOOLS, "max_tokens": 400, **fields}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert "x-lamina-ignored-fields" not in answer.headers
    return answer.json()["choices"]


def refused(client, **fields):
    answer = client.post("/v1/chat/completions", json={"messages": [USER], **fields})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def check_calls(calls, names=("get_weather", "now")):
    assert calls
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        assert call["type"] == "function"
        assert call["function"]["name"] in names
        arguments = json.loads(call["function"]["arguments"])
        is_now = call["function"]["name"] == "now"
        jsonschema.validate(arguments, {"type": "object", "maxProperties": 0} if is_now else PARAMETERS)


def joined(events):
    """The messages of a stream and the reasons of their ends, by index."""
    messages, reasons = {}, {}
    for choice in (choice for event in events if event != "[DONE]" for choice in event["choices"]):
        message = messages.setdefault(choice["index"], {"content": "", "reasoning": "", "calls": []})
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning_content") or ""
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                assert piece["index"] == len(message["calls"])
                message["calls"].append({**piece, "function": dict(piece["function"])})
            else:
                assert set(piece) == {"index", "function"}
                assert set(piece["function"]) == {"arguments"}
                message["calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        if choice["finish_reason"] is not None:
            assert choice["index"] not in reasons
            reasons[choice["index"]] = choice["finish_reason"]
    return messages, reasons


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_is_required_parses_whatever_is_drawn(tool_client, choice):
    choices = [
        each
        for seed in range(5)
        for each in ask(tool_client, tool_choice=choice, temperature=1, seed=seed, n=8)
    ]
    reasons = [each["finish_reason"] for each in choices]
    assert set(reasons) <= {"tool_calls", "length"}
    assert reasons.count("tool_calls") > 20
    for each in choices:
        if each["finish_reason"] == "tool_calls":
            assert each["message"]["content"] is None
            check_calls(
                each["message"]["tool_calls"], ("get_weather",) if choice is NAMED else ("get_weather", "now")
            )
            assert choice == "required" or len(each["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("seed", range(6))
def test_a_stream_says_what_the_whole_answer_says(tool_client, seed):
    fields = {"tool_choice": "required", "temperature": 1, "seed": seed, "n": 2, "max_tokens": 300}
    whole = ask(tool_client, **fields)
    messages, reasons = joined(
        streamed(tool_client, "/v1/chat/completions", messages=[USER], tools=TOOLS, **fields)
    )
    for choice in whole:
        message = messages[choice["index"]]
        calls = [call["function"] for call in choice["message"].get("tool_calls", ())]
        assert [call["function"] for call in message["calls"]] == calls
        assert message["content"] == (choice["message"]["content"] or "")
        assert reasons[choice["index"]] == choice["finish_reason"]


def test_no_parallel_calls_means_one_call(tool_client):
    for choice in ask(
        tool_client, tool_choice="required", parallel_tool_calls=False, temperature=1, seed=1, n=16
    ):
        if choice["finish_reason"] == "tool_calls":
            assert len(choice["message"]["tool_calls"]) == 1


def test_what_the_model_writes_freely_has_a_reason_for_its_end(tool_client):
    for seed in range(25):
        for choice in ask(tool_client, temperature=1, seed=seed, n=8, max_tokens=12):
            assert choice["finish_reason"] in ("stop", "length", "tool_calls")
            assert choice["message"]["content"] is not None or choice["message"].get("tool_calls")


def test_without_a_choice_of_tools_the_prompt_has_none(tool_client):
    plain = tool_client.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 3}).json()
    none = {"messages": [USER], "max_tokens": 3, "tools": TOOLS, "tool_choice": "none"}
    answer = tool_client.post("/v1/chat/completions", json=none).json()
    assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_results_of_tools_in_the_history_are_read(tool_client):
    (call,) = ask(tool_client, tool_choice=NAMED, temperature=0)[0]["message"]["tool_calls"]
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "17 degrees"},
    ]
    assert ask(tool_client, messages=messages, max_tokens=5)[0]["finish_reason"]


@pytest.mark.parametrize("name", [form.name for form in FORMATS])
def test_calls_are_held_to_each_form_and_read_back(start_server, make_chat_folder, name):
    server = start_server(folder=make_chat_folder(BODY), tool_parser=name)
    try:
        for seed in range(2):
            for choice in ask(server.client, tool_choice="required", temperature=1, seed=seed, n=4):
                if choice["finish_reason"] == "tool_calls":
                    check_calls(choice["message"]["tool_calls"])
                    assert choice["message"]["content"] is None
    finally:
        server.close()


def test_json_or_a_call_is_written_where_both_are_asked_for(tool_client):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for choice in ask(tool_client, response_format=form, temperature=1, seed=3, n=16):
        if choice["finish_reason"] == "tool_calls":
            check_calls(choice["message"]["tool_calls"])
        elif choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)


def bad_tool(**function):
    return [TOOLS[1], {"type": "function", "function": function}]


REFUSED = {
    "no tools": ({"tools": []}, "tools"),
    "no tools to choose from": ({"tool_choice": "required"}, "tool_choice"),
    "another choice": ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    "an unknown name": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice.function.name",
    ),
    "no name": ({"tools": bad_tool(description="x")}, "tools[1].function.name"),
    "an empty name": ({"tools": bad_tool(name="")}, "tools[1].function.name"),
    "a name twice": ({"tools": bad_tool(name="now")}, "tools[1].function.name"),
    "no function": ({"tools": [{"type": "function"}]}, "tools[0].function"),
    "another type": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "a wrong type": (
        {"tools": bad_tool(name="x", parameters={"type": "object", "properties": {"a": {"type": "txt"}}})},
        "tools[1].function.parameters",
    ),
    "no object": (
        {"tools": bad_tool(name="x", parameters={"type": "string"})},
        "tools[1].function.parameters",
    ),
    "no schema": (
        {"tools": bad_tool(name="x", parameters={"properties": {"a": "b"}})},
        "tools[1].function.parameters",
    ),
    "no text": ({"tools": bad_tool(name="x", parameters="x")}, "tools[1].function.parameters"),
    "what cannot be enforced": (
        {
            "tools": bad_tool(name="x", parameters={"type": "object", "not": {"propertyNames": {}}}),
            "tool_choice": "required",
        },
        "tools[1].function.parameters",
    ),
    "a text and calls": ({"tools": TOOLS, "guided_regex": "a+"}, "guided_regex"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_offered_is_refused_by_name(tool_client, case):
    fields, param = REFUSED[case]
    error = refused(tool_client, **fields)
    assert error["param"] == param
    assert param in error["message"] or case == "what cannot be enforced"


def test_a_template_that_does_not_know_tools_refuses_them(client):
    assert refused(client, tools=TOOLS, tool_choice="required")["param"] == "tools"
    assert refused(client, tools=TOOLS)["param"] == "tools"


def test_calls_of_an_unknown_form_are_refused_unless_they_are_required(start_server, make_chat_folder):
    server = start_server(folder=make_chat_folder("{% if tools %}tools{% endif %}{{ messages[0].content }}"))
    error = refused(server.client, tools=TOOLS)
    assert (error["param"], error["code"]) == ("tools", "unsupported_field")
    for choice in ask(server.client, tool_choice="required", temperature=1, seed=0, n=4):
        assert choice["finish_reason"] == "length" or check_calls(choice["message"]["tool_calls"]) is None
    server.close()


def test_an_unknown_parser_is_told_before_the_model_is_loaded(start_server):
    for field in ("tool_parser", "reasoning_parser"):
        with pytest.raises(ConfigError, match=f"{field} is 'nope'; wanted one of auto, none, "):
            start_server(**{field: "nope"})
