"""Prompts as token ids: what cannot be served is refused, with the reason and the remedy."""

import numpy as np
import pytest
import torch

from lamina.common.errors import RequestError
from lamina.runtime.prompts import check_prompt

LIMITS = {"vocab_size": 320, "max_model_len": 64, "capacity_tokens": 32}


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([], r"empty \(0 tokens\)"),
        ((), r"empty \(0 tokens\)"),
        ([1, 320], r"token 320 at position 1 .* ids must be 0 to 319"),
        ([1, 2, -1], r"token -1 at position 2 "),
        ([1, 2.0], r"token 2.0 at position 1 is no integer"),
        ([1, "2"], r"token '2' at position 1 is no integer"),
        ([True], r"token True at position 0 is no integer"),
        ([[1, 2]], r"token \[1, 2\] at position 0 is no integer"),
        ("hello", r"the prompt is str, wanted token ids"),
        (5, r"the prompt is 5, wanted a sequence"),
        (None, r"the prompt is None, wanted a sequence"),
        ([1] * 64, r"64 tokens, but max_model_len 64 leaves room for at most 63"),
        ([1] * 33, r"33 tokens, but the whole KV cache holds 32"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_with_the_reason(prompt, message):
    with pytest.raises(RequestError, match=message):
        check_prompt(prompt, **LIMITS)


@pytest.mark.parametrize(
    "prompt", [[0, 319], (0, 319), np.array([0, 319]), torch.tensor([0, 319]), iter([0, 319])]
)
def test_a_prompt_of_any_integers_becomes_plain_ones(prompt):
    ids = check_prompt(prompt, **LIMITS)
    assert ids == (0, 319)
    assert {type(id_) for id_ in ids} == {int}


def test_the_longest_prompts_that_fit_are_served():
    assert len(check_prompt([1] * 32, **LIMITS)) == 32
    assert len(check_prompt([1] * 63, **{**LIMITS, "capacity_tokens": 63})) == 63


@pytest.mark.parametrize(
    "declared, said", [(8, "or raise max_model_len"), (4, "only allow_long_context goes beyond")]
)
def test_no_more_is_told_to_be_had_than_the_checkpoint_declares(declared, said):
    with pytest.raises(RequestError, match=f"leaves room for at most 3 and one new token; .*{said}$"):
        check_prompt([1] * 4, vocab_size=9, max_model_len=4, capacity_tokens=64, declared_len=declared)
