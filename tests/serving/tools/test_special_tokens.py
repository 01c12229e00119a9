"""Markers of calls that are tokens, special or not: held to as such, and seen by the parser."""

import json

import jsonschema
import pytest
from tokenizers import AddedToken

from ..reading import streamed
from .conftest import BODY, PARAMETERS, TOOLS
from .test_tools_over_http import joined

FORMS = {
    "mistral": ["[TOOL_CALLS]"],
    "mistral_args": ["[TOOL_CALLS]", "[ARGS]"],
    "granite": ["<|tool_call|>"],
    "hermes": ["<tool_call>", "</tool_call>"],
    "phi4_mini": ["<|tool_call|>", "<|/tool_call|>"],
}
PATH = "/v1/chat/completions"
REFERRING = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#/$defs/x"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"x": {"enum": ["Rome", 5, None, True]}},
}


@pytest.fixture(scope="module")
def ask(start_server, make_chat_folder, bbpe_tokenizer):
    """ask(form, markers, is_special, **fields) -> the choices of a chat, and the same streamed.

    markers: tokens that the tokenizer has.
    """
    servers = {}

    def make(form, markers=(), is_special=True, **fields):
        key = form, is_special, *markers
        if key not in servers:
            tokenizer = bbpe_tokenizer()
            tokenizer.chat_template = BODY
            tokenizer.add_tokens([AddedToken(each, special=is_special, normalized=False) for each in markers])
            settings = {"tokenizer": tokenizer}
            servers[key] = start_server(folder=make_chat_folder(BODY), settings=settings, tool_parser=form)
        body = {"messages": [{"role": "user", "content": "hello"}], "tools": TOOLS, "max_tokens": 400}
        answer = servers[key].client.post(PATH, json={**body, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"], joined(streamed(servers[key].client, PATH, **{**body, **fields}))[0]

    yield make
    for server in servers.values():
        server.close()


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_marker_that_is_a_token_is_written_as_it_and_read(ask, form, is_special, bbpe_tokenizer):
    tokenizer = bbpe_tokenizer()
    tokenizer.add_tokens([AddedToken(each, special=is_special, normalized=False) for each in FORMS[form]])
    marker = tokenizer.convert_tokens_to_ids(FORMS[form][0])
    asked = {"tool_choice": "required", "temperature": 1, "seed": 2, "n": 8, "return_token_ids": True}
    choices, messages = ask(form, FORMS[form], is_special, **asked)
    ended = [choice for choice in choices if choice["finish_reason"] == "tool_calls"]
    assert ended
    for choice in ended:
        assert choice["message"]["content"] is None
        assert choice["token_ids"][0] == marker
        calls = [call["function"] for call in choice["message"]["tool_calls"]]
        assert [call["function"] for call in messages[choice["index"]]["calls"]] == calls
        for call in choice["message"]["tool_calls"]:
            assert call["function"]["name"] in ("get_weather", "now")
            json.loads(call["function"]["arguments"])
            assert "mistral" not in form or len(call["id"]) == 9  # as its template wants them


@pytest.mark.parametrize("form", ["hermes", "pythonic", "json"])
def test_arguments_keep_to_schemas_that_refer_to_their_own_parts(ask, form):
    tool = {"type": "function", "function": {"name": "f", "parameters": REFERRING}}
    other = {"type": "function", "function": {"name": "g", "parameters": PARAMETERS}}
    choices, _ = ask(form, tools=[tool, other], tool_choice="required", temperature=1, seed=4, n=8)
    calls = [
        call["function"]
        for choice in choices
        if choice["finish_reason"] == "tool_calls"
        for call in choice["message"]["tool_calls"]
    ]
    assert calls
    for call in calls:
        schema = REFERRING if call["name"] == "f" else PARAMETERS
        jsonschema.validate(json.loads(call["arguments"]), schema)
