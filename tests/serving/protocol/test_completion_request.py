"""Completions as requests: prompts of every kind, and limits on how much one request may ask."""

import json

import pytest

from lamina.serving.errors import ApiError
from lamina.serving.protocol.completions import CompletionRequest
from lamina.serving.protocol.decoding import decode
from lamina.serving.protocol.generation import check_num_sequences, check_prompt_logprobs


def decoded(**body):
    return decode(CompletionRequest, json.dumps(body).encode()).request


@pytest.mark.parametrize(
    "prompt, lengths",
    [("hello", [2]), (["hello", "th"], [2, 2]), ([5, 6, 7], [3]), ([[5], [6, 7]], [1, 2]), (["x"], [2])],
)
def test_prompts_are_texts_or_ids_one_or_many(read, prompt, lengths):
    *_, prompts = read(CompletionRequest, {"prompt": prompt})
    assert [len(each) for each in prompts] == lengths


def test_a_text_gets_a_bos_unless_it_is_not_wanted(read):
    assert read(CompletionRequest, {"prompt": "hello"})[3][0][0] == 1
    assert 1 not in read(CompletionRequest, {"prompt": "hello", "add_special_tokens": False})[3][0]


def test_sixteen_tokens_are_written_by_default(read):
    assert read(CompletionRequest, {"prompt": "x"})[1].max_tokens == 16
    assert read(CompletionRequest, {"prompt": "x", "max_tokens": None})[1].max_tokens == 16


def test_nothing_is_written_where_nothing_is_asked_for(read):
    request, params, *_ = read(
        CompletionRequest, {"prompt": "x", "max_tokens": 0, "echo": True, "logprobs": 1}
    )
    assert request.writes_nothing
    assert (params.max_tokens, params.logprobs, params.prompt_logprobs) == (1, 1, 1)


def test_an_echo_with_logprobs_asks_for_those_of_the_prompt(read):
    assert read(CompletionRequest, {"prompt": "x", "echo": True})[1].prompt_logprobs is None
    assert read(CompletionRequest, {"prompt": "x", "echo": True, "logprobs": 3})[1].prompt_logprobs == 3
    both = {"prompt": "x", "echo": True, "logprobs": 3, "prompt_logprobs": 5}
    assert read(CompletionRequest, both)[1].prompt_logprobs == 5


@pytest.mark.parametrize("prompt", ["x" * 255, "x" * 5000, "x" * 10**6, [7] * 256, [7] * 100_000])
def test_a_prompt_that_does_not_fit_is_told_by_both_numbers(refused, prompt):
    error = refused(CompletionRequest, {"prompt": prompt})
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    assert "maximum context length" in error.message
    assert "25" in error.message


def test_one_prompt_of_many_is_named(refused):
    assert refused(CompletionRequest, {"prompt": ["x", "x" * 300]}).param == "prompt[1]"
    assert refused(CompletionRequest, {"prompt": [[5], [999]]}).param == "prompt[1]"
    assert refused(CompletionRequest, {"prompt": [[5], []]}).param == "prompt[1]"
    assert refused(CompletionRequest, {"prompt": [[5], ["x"]]}).param == "prompt[1][0]"


def test_a_suffix_is_refused_by_name(refused):
    assert refused(CompletionRequest, {"prompt": "x", "suffix": "y"}).param == "suffix"


@pytest.mark.parametrize("field, value", [("grammar", "x"), ("logits_processors", ["x"])])
def test_what_would_hold_an_answer_to_something_is_refused_by_name(refused, field, value):
    assert refused(CompletionRequest, {"prompt": "x", field: value}).param == field


@pytest.mark.parametrize(
    "fields, param",
    [({"n": 10**9}, "n"), ({"best_of": 1025}, "best_of"), ({"prompt": ["x"] * 1025}, "prompt")],
)
def test_more_than_a_server_takes_is_refused_by_name(refused, fields, param):
    error = refused(CompletionRequest, {"prompt": "x", **fields})
    assert error.param == param
    assert "1024" in error.message


@pytest.mark.parametrize("field", ["n", "best_of"])
def test_prompts_times_answers_are_bounded(config, field):
    request = decoded(prompt=["x"] * 1024, **{field: 128})
    with pytest.raises(ApiError) as caught:
        check_num_sequences(request, 1024, config)
    assert caught.value.param == field
    assert str(1024 * 128) in caught.value.message
    assert check_num_sequences(decoded(prompt="x", n=8), 128, config) == 1024


def test_logprobs_of_all_prompts_are_bounded_together(read, config):
    params = read(CompletionRequest, {"prompt": "x", "prompt_logprobs": 20})[1]
    check_prompt_logprobs(params, 10_000, config)
    with pytest.raises(ApiError) as caught:
        check_prompt_logprobs(params, 100_000, config)
    assert caught.value.param == "prompt_logprobs"


def test_logprobs_of_a_prompt_are_not_streamed_but_echoed(refused, read):
    assert refused(CompletionRequest, {"prompt": "x", "stream": True, "prompt_logprobs": 1}).param
    streamed = {"prompt": "x", "stream": True, "echo": True, "logprobs": 1}
    assert read(CompletionRequest, streamed)[1].prompt_logprobs == 1
