"""Sampling parameters: what is refused by name, and what the others resolve to."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from lamina.common.errors import RequestError
from lamina.runtime.engine.input_processor import total_tokens
from lamina.runtime.sampling_params import SamplingParams, check_ids, resolve_bad_words, stopping_token_ids


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"min_tokens": -1},
        {"min_tokens": None},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"temperature": True},
        {"temperature": 1e39},
        {"top_k": -2},
        {"top_k": 1.5},
        {"top_p": 0},
        {"top_p": 1.01},
        {"top_p": [0.5]},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"typical_p": 0},
        {"typical_p": 1.5},
        {"presence_penalty": 2.1},
        {"presence_penalty": None},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": "a lot"},
        {"repetition_penalty": 0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": 1e-38},
        {"repetition_penalty": 1e39},
        {"logit_bias": [5]},
        {"logit_bias": {"abc": 1}},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {5: 101}},
        {"logit_bias": {"5": -100.5}},
        {"logit_bias": {5: None}},
        {"logit_bias": {"5": 1, "05": 2}},
        {"logit_bias": {5: 1, "5": 2}},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [-1]},
        {"allowed_token_ids": 5},
        {"bad_words": "word"},
        {"bad_words": [""]},
        {"bad_words": [" "]},
        {"bad_words": [[]]},
        {"bad_words": [[-1]]},
        {"bad_words": [5]},
        {"bad_words": ["a\ud800"]},
        {"logits_processors": [5]},
        {"logits_processors": len},
        {"seed": 2**63},
        {"seed": 0.5},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": 3},
        {"stop": [3]},
        {"stop": b"x"},
        {"stop": ["a\ud800"]},
        {"stop": {"a": 1}},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": ["a"]},
        {"stop_token_ids": [True]},
        {"stop_token_ids": 5},
        {"stop_token_ids": "5"},
        {"ignore_eos": 1},
        {"include_stop_str_in_output": None},
        {"skip_special_tokens": "no"},
        {"detokenize": 0},
    ],
)
def test_a_wrong_parameter_is_refused_with_its_name_and_value(wrong):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**wrong)
    (name, value), message = *wrong.items(), str(caught.value)
    assert message.startswith(name)
    assert "wanted" in message
    parts = [
        value,
        *(value if isinstance(value, list) else []),
        *(value.values() if isinstance(value, dict) else []),
    ]
    parts += (
        [*value]
        if isinstance(value, dict)
        else [item for own in parts if isinstance(own, list) for item in own]
    )
    assert any(repr(part) in message for part in parts)


@pytest.mark.parametrize(
    "wrong,message",
    [
        ({"stop_token_ids": [320]}, "stop_token_ids holds 320; wanted ids of the vocabulary, 0 to 319"),
        ({"logit_bias": {"999999": 5}}, "logit_bias holds 999999; wanted"),
        ({"allowed_token_ids": [1, 320]}, "allowed_token_ids holds 320; wanted"),
        ({"bad_words": [[1, 400]]}, "bad_words holds 400; wanted"),
        (
            {"bad_words": [[1], [2]], "allowed_token_ids": [1, 2]},
            "every token that is allowed is one of them",
        ),
        ({"min_tokens": 1, "allowed_token_ids": [7]}, "every token that is allowed stops"),
        ({"min_tokens": 1, "stop_token_ids": range(320)}, "every token that is allowed stops"),
        (
            {"min_tokens": 1, "stop_token_ids": [1], "bad_words": [[i] for i in range(320) if i != 1]},
            "every token that is allowed stops",
        ),
    ],
)
def test_ids_that_the_model_cannot_say_are_refused_and_so_is_saying_nothing(wrong, message):
    params = SamplingParams(**wrong)
    with pytest.raises(RequestError, match=message):
        check_ids(params, [7, *params.stop_token_ids], 320)
    check_ids(SamplingParams(bad_words=[[319]], allowed_token_ids=[7, 319]), [7], 320)


def test_more_tokens_at_least_than_at_most_are_refused():
    with pytest.raises(RequestError, match="min_tokens is 5, above max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_an_unknown_parameter_is_a_type_error():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)


def test_parameters_are_stored_in_one_form():
    params = SamplingParams(
        stop="x", stop_token_ids=[np.int64(3)], temperature=1, top_k=np.int32(4), max_tokens=7
    )
    assert params.stop == ("x",)
    assert params.stop_token_ids == (3,)
    assert [type(value) for value in (params.stop_token_ids[0], params.top_k, params.temperature)] == [
        int,
        int,
        float,
    ]
    assert SamplingParams(stop=["x", "yz"]).stop == ("x", "yz")
    assert SamplingParams().stop == SamplingParams().stop_token_ids == ()
    assert params == dataclasses.replace(params)
    assert hash(params) == hash(dataclasses.replace(params))


def test_bad_words_are_met_at_the_beginning_of_a_word_and_within_one():
    params = SamplingParams(bad_words=["ab", (9, 8)])
    settled = resolve_bad_words(params, lambda text: [ord(letter) for letter in text])
    assert settled.bad_words == ((97, 98), (32, 97, 98), (9, 8))
    assert resolve_bad_words(settled, ord) is settled
    with pytest.raises(RequestError, match=r"bad_words holds '~'; wanted words that the tokenizer has"):
        resolve_bad_words(SamplingParams(bad_words=["~"]), lambda text: [])


def test_what_adjusts_logits_and_what_does_not():
    assert not SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, typical_p=1.0).adjusts
    assert not SamplingParams(repetition_penalty=1.0, logit_bias={}, bad_words=()).adjusts
    for wanted in (
        {"typical_p": 0.5},
        {"presence_penalty": 0.1},
        {"logit_bias": {"3": 1}},
        {"bad_words": ["a"]},
    ):
        assert SamplingParams(**wanted).adjusts


def test_a_requests_own_choice_beats_the_models_default_which_beats_the_neutral_value():
    defaults = SimpleNamespace(temperature=0.1, top_k=1, top_p=None, min_p=None)
    for own, wanted in [
        ({"temperature": 1.5}, (1.5, 1, 1.0, 0.0)),
        ({"temperature": 0}, (0.0, 1, 1.0, 0.0)),
        ({"top_k": 0, "top_p": 0.5}, (0.1, 0, 0.5, 0.0)),
        ({}, (0.1, 1, 1.0, 0.0)),
    ]:
        params = SamplingParams(**own).resolve(defaults, seed=9)
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == wanted
    params = SamplingParams(seed=3).resolve(None, seed=9)
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (
        1.0,
        0,
        1.0,
        0.0,
        3,
    )
    assert SamplingParams().resolve(None, seed=9).seed == 9


def test_the_stop_set_is_every_eos_and_the_callers_ids_or_the_callers_alone():
    assert stopping_token_ids(SamplingParams(stop_token_ids=[9]), (2, 7)) == {2, 7, 9}
    assert stopping_token_ids(SamplingParams(stop_token_ids=[9], ignore_eos=True), (2, 7)) == {9}
    assert stopping_token_ids(SamplingParams(), (5, 6, 7)) == {5, 6, 7}


def test_the_context_caps_what_is_asked_for():
    assert total_tokens(10, SamplingParams(max_tokens=5), 64) == 15
    assert total_tokens(10, SamplingParams(max_tokens=100_000), 64) == 64
    assert total_tokens(10, SamplingParams(), 64) == 64
