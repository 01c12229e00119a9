"""Conversations as requests: what the template reads, what the sampler gets, and what is refused by name."""

import json

import pytest

from lamina.runtime.tokenization.tokenizer import Tokenizer
from lamina.serving.config import ServeConfig
from lamina.serving.errors import ApiError
from lamina.serving.protocol.chat import ChatRequest
from lamina.serving.protocol.decoding import decode

USER = {"role": "user", "content": "hello"}
TRUSTING = ServeConfig(model_names=("tiny",), trust_request_chat_template=True)


def chat(*messages, **fields):
    return {"messages": list(messages or [USER]), **fields}


def text_of(processor, body, config=TRUSTING):
    request = decode(ChatRequest, json.dumps(body).encode()).request
    return processor.tokenizer.decode(request.prompt(processor, config), skip_special_tokens=False)


UNSERVED = {
    "guided_decoding_backend": "outlines",
    "regex": "a+",
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "prediction": {"type": "content", "content": "x"},
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "wav"},
    "web_search_options": {},
    "reasoning_effort": "low",
    "use_beam_search": True,
    "length_penalty": 2.0,
    "logits_processors": ["f"],
    "echo": True,
    "documents": [{"text": "x"}],
    "max_new_tokens": 5,
    "n_predict": 5,
    "repeat_penalty": 1.1,
}


@pytest.mark.parametrize("field", UNSERVED)
def test_a_field_that_would_change_the_answer_is_refused_by_name(refused, field):
    error = refused(ChatRequest, chat(**{field: UNSERVED[field]}))
    assert error.param == field
    assert field in error.message


NEUTRAL = {
    "response_format": {"type": "text"},
    "tool_choice": "none",
    "function_call": "none",
    "modalities": ["text"],
    "tools": None,
    "functions": None,
    "guided_json": None,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "echo": False,
    "add_special_tokens": False,
    "include_reasoning": True,
}


@pytest.mark.parametrize("field", NEUTRAL)
def test_a_value_that_asks_for_nothing_is_accepted(read, field):
    assert read(ChatRequest, chat(**{field: NEUTRAL[field]}))[1:] == read(ChatRequest, chat())[1:]


def test_without_a_limit_an_answer_may_fill_the_context(read):
    assert read(ChatRequest, chat())[1].max_tokens is None


def test_the_newer_name_of_the_limit_goes_before_the_older(read):
    params = read(ChatRequest, chat(max_tokens=5, max_completion_tokens=7))[1]
    assert params.max_tokens == 7


def test_a_limit_beyond_the_context_is_a_ceiling(read):
    assert read(ChatRequest, chat(max_completion_tokens=10**6))[1].max_tokens == 10**6


@pytest.mark.parametrize("length", [255, 256, 300, 5000, 10**6])
def test_a_conversation_that_does_not_fit_is_told_by_both_numbers(refused, length):
    error = refused(ChatRequest, chat({"role": "user", "content": "x" * length}))
    assert error.code == "context_length_exceeded"
    assert error.param == "messages"
    assert "maximum context length" in error.message
    assert "25" in error.message  # 255 or 256 tokens


def test_the_last_tokens_are_kept_where_that_is_asked(read, processor):
    long = {"role": "user", "content": "x" * 300}
    *_, prompts = read(ChatRequest, chat(long, truncate_prompt_tokens=-1))
    assert len(prompts[0]) == processor.max_prompt_tokens
    *_, prompts = read(ChatRequest, chat(USER, truncate_prompt_tokens=3))
    assert prompts[0] == read(ChatRequest, chat())[3][0][-3:]


def test_all_roles_and_parts_reach_the_template(processor):
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": "d"},
        {"role": "tool", "content": "e", "tool_call_id": "1"},
    ]
    expected = "<s>[system]a</s>[user]bc</s>[assistant]d</s>[tool]e</s>[assistant]"
    assert text_of(processor, chat(*messages)) == expected


def test_a_developer_is_the_system_to_a_template_that_knows_none(processor):
    message = {"role": "developer", "content": "a"}
    assert text_of(processor, chat(message)).startswith("<s>[system]a")
    template = "{% for m in messages %}{{ m.role }} is system or developer {% endfor %}"
    assert text_of(processor, chat(message, chat_template=template)).startswith("developer is")


def test_calls_of_tools_in_the_history_reach_the_template_with_their_arguments(processor):
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.id }}={{ c.function.name }}({{ c.function.arguments.a }}){% endfor %}"
        "{% if m.role == 'tool' %}{{ m.tool_call_id }}:{{ m.content }}{% endif %}{% endfor %}"
    )
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 5}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]
    assert text_of(processor, chat(*messages, chat_template=template)) == "c1=f(5)c1:7"


def test_a_final_message_is_continued_and_not_answered(processor):
    messages = [USER, {"role": "assistant", "content": "well,"}]
    assert text_of(processor, chat(*messages, continue_final_message=True)).endswith("[assistant]well,")
    assert text_of(processor, chat(*messages, add_generation_prompt=False)).endswith("well,</s>")


def test_a_final_message_cannot_be_continued_and_answered(refused):
    body = chat(USER, continue_final_message=True, add_generation_prompt=True)
    assert refused(ChatRequest, body).param == "continue_final_message"


def test_a_template_of_a_request_is_used_only_where_the_server_trusts_it(refused, processor):
    body = chat(chat_template="{{ messages[0].content }}!")
    assert refused(ChatRequest, body).param == "chat_template"
    assert text_of(processor, body) == "hello!"


def test_variables_reach_the_template(processor):
    body = chat(chat_template="{{ mood }}{{ reasoning_effort }}", chat_template_kwargs={"mood": "glad"})
    assert text_of(processor, body | {"reasoning_effort": "low"}) == "gladlow"


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{% for %}", "{{ messages[9].content.x }}", "{{ 1 // 0 }}"]
)
def test_what_a_template_refuses_is_a_400_about_the_messages(processor, template):
    with pytest.raises(ApiError) as caught:
        text_of(processor, chat(chat_template=template))
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_a_model_without_a_template_refuses_chats(new_processor, bbpe_tokenizer):
    backend = bbpe_tokenizer()
    backend.chat_template = None
    with pytest.raises(ApiError) as caught:
        text_of(new_processor(tokenizer=Tokenizer(backend)), chat())
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_variables_nested_as_deep_as_a_body_may_be_are_a_400_or_served(processor):
    deep = '{"a":' * 900 + "1" + "}" * 900
    body = json.dumps(chat())[:-1] + f', "chat_template_kwargs": {deep}}}'
    try:
        decode(ChatRequest, body.encode()).request.prompt(processor, TRUSTING)
    except ApiError as error:
        assert error.status == 400  # noqa: PT017


def test_the_number_of_likeliest_needs_that_logprobs_are_wanted(refused, read):
    assert refused(ChatRequest, chat(top_logprobs=3)).param == "top_logprobs"
    assert refused(ChatRequest, chat(top_logprobs="5", logprobs=True)).param == "top_logprobs"
    assert read(ChatRequest, chat(top_logprobs=0))[1].logprobs is None
    assert read(ChatRequest, chat(logprobs=True))[1].logprobs == 0


def test_options_of_a_stream_need_a_stream(refused):
    assert refused(ChatRequest, chat(stream_options={"include_usage": True})).param == "stream_options"


def test_a_stream_cannot_wait_for_the_best(refused, read):
    assert refused(ChatRequest, chat(stream=True, best_of=2)).param == "best_of"
    assert read(ChatRequest, chat(stream=True, n=2, best_of=2))[1].n == 2


def test_a_caller_gets_no_earlier_turn_than_its_key_allows():
    request = decode(ChatRequest, json.dumps(chat(priority=-5)).encode()).request
    assert request.options().priority == -5
    assert request.options(floor=3, timeout=2.5).priority == 3
    assert request.options(floor=-9).priority == -5


def test_more_messages_than_a_server_takes_are_refused(refused):
    assert refused(ChatRequest, chat(*[USER] * 8193)).param == "messages"
