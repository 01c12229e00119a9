"""Reasoning over HTTP with a real model: it stands beside the content, and forms begin after it."""

import pytest
from tokenizers import AddedToken

from ..reading import streamed
from .conftest import BODY, THINKING, TOOLS
from .test_tools_over_http import USER, joined

PATH = "/v1/chat/completions"
PROMPT = 8  # tokens that are left of a prompt


def ask(client, **fields):
    answer = client.post(PATH, json={"messages": [USER], "max_tokens": 600, "temperature": 1, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def test_what_the_prompt_began_is_reasoning_until_it_ends(thinking_client):
    for choice in ask(thinking_client, max_tokens=20, seed=1, n=4):
        assert choice["message"]["reasoning_content"]
        assert choice["message"]["content"] is None  # </think> is not drawn by chance


def test_where_the_prompt_has_ended_it_there_is_none(thinking_client):
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for choice in ask(thinking_client, max_tokens=20, seed=1, n=4, **off):
        assert "reasoning_content" not in choice["message"]
        assert choice["message"]["content"]


def test_reasoning_is_left_out_where_that_is_asked(thinking_client):
    for choice in ask(thinking_client, max_tokens=20, seed=1, n=2, include_reasoning=False):
        assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}


@pytest.fixture(scope="module")
def writes(scripted_server, bbpe_tokenizer):
    """writes(text, template, tokens) -> a client of a server whose model, but for a form, writes that text.

    tokens: of its tokenizer, none of which is special.
    """
    servers = []

    def make(text, template=THINKING, tokens=()):
        tokenizer = bbpe_tokenizer()
        tokenizer.add_tokens([AddedToken(name, normalized=False) for name in tokens])
        tokenizer.chat_template = template
        prompt = [tokenizer.bos_token_id] * PROMPT
        script = [*prompt[1:], *tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        servers.append(scripted_server(script, settings={"tokenizer": tokenizer}))
        return servers[-1].client

    yield make
    for server in servers:
        server.close()


def both_ways(client, **fields):
    """Content, reasoning, calls and the reason of the end, which are the same streamed and not."""
    body = {"messages": [USER], "temperature": 0, "truncate_prompt_tokens": PROMPT, **fields}
    answer = client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    messages, reasons = joined(streamed(client, PATH, **body))
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    assert [call["function"] for call in messages[0]["calls"]] == calls
    assert messages[0]["content"] == (message["content"] or "")
    assert messages[0]["reasoning"] == message.get("reasoning_content", "")
    assert reasons[0] == choice["finish_reason"]
    return message["content"], message.get("reasoning_content"), calls, choice["finish_reason"]


def test_reasoning_ends_and_content_begins(writes):
    client = writes("Hm.\n</think>\n\nYes.")
    assert both_ways(client) == ("Yes.", "Hm.", [], "stop")
    assert both_ways(client, include_reasoning=False) == ("Yes.", None, [], "stop")
    assert both_ways(client, logprobs=True, top_logprobs=1, stream_interval=4)[:2] == ("Yes.", "Hm.")


def test_a_form_begins_after_the_reasoning(writes):
    client = writes("Hm.\n</think>\n\nYes, sir.")
    content, reasoning, _, reason = both_ways(client, guided_regex="[0-9]{2,4}", max_tokens=60)
    assert reasoning == "Hm."
    assert reason == "stop"
    assert content.isdigit()
    assert 2 <= len(content) <= 4


STRUCTURE = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def test_reasoning_ends_and_calls_begin_with_the_tokens_that_the_model_has_for_them(writes, bbpe_tokenizer):
    tokenizer = bbpe_tokenizer()
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in STRUCTURE])
    call, called, _, over = tokenizer.convert_tokens_to_ids(STRUCTURE)
    text = 'Hm.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    client = writes(text, tokens=STRUCTURE)
    asked = {"tools": TOOLS, "tool_choice": "required"}
    found = both_ways(client, **asked)
    assert found == (None, "Hm.", [{"name": "now", "arguments": "{}"}], "tool_calls")
    assert both_ways(client, **asked, logprobs=True, stream_interval=3) == found
    body = {"messages": [USER], "temperature": 0, "truncate_prompt_tokens": PROMPT, **asked}
    (choice,) = client.post(PATH, json={**body, "return_token_ids": True}).json()["choices"]
    own = [token for token in choice["token_ids"] if token in (call, called, over)]
    assert own == [over, call, called]


def test_a_form_that_has_the_text_of_such_a_token_has_it_as_text(writes):
    client = writes("I quote </thin> and end.</think>It is", tokens=STRUCTURE)
    found = both_ways(client, guided_choice=["It is </think>, a tag", "no"])
    assert found == ("It is </think>, a tag", "I quote </thin> and end.", [], "stop")


def test_calls_that_are_required_come_after_the_reasoning(writes):
    text = 'Hm.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    found = both_ways(writes(text), tools=TOOLS, tool_choice="required")
    assert found == (None, "Hm.", [{"name": "now", "arguments": "{}"}], "tool_calls")


def test_a_call_that_the_model_decides_on_is_read(writes):
    text = 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    client = writes(text, BODY)
    calls = [{"name": "get_weather", "arguments": '{"city": "Rome"}'}]
    assert both_ways(client, tools=TOOLS) == ("I look.", None, calls, "tool_calls")
    assert both_ways(client, tools=TOOLS, return_token_ids=True)[2] == calls
    assert both_ways(client) == (text, None, [], "stop")
    cut = both_ways(client, tools=TOOLS, max_tokens=len(text) - 25)
    assert cut[3] == "length"


def test_a_form_holds_where_the_model_begins_no_reasoning(writes):
    template = BODY + "{# <think></think> #}"
    assert both_ways(writes("no", template), guided_choice=["yes", "no"])[:2] == ("no", None)
    client = writes("<think>Hm.</think>no", template)
    assert both_ways(client, guided_choice=["yes", "no"]) == ("no", "Hm.", [], "stop")


def test_without_a_parser_reasoning_stays_in_the_text(start_server, make_chat_folder):
    server = start_server(folder=make_chat_folder(THINKING), reasoning_parser="none")
    for choice in ask(server.client, max_tokens=8, seed=1, n=2):
        assert set(choice["message"]) == {"role", "content", "refusal"}
        assert choice["message"]["content"] is not None
    server.close()
