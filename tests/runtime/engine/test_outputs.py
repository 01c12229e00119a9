"""What callers get back."""

import dataclasses

import pytest

from lamina.runtime.engine.outputs import CompletionOutput, RequestOutput, RequestTimes


def answer(index: int, text: str) -> CompletionOutput:
    return CompletionOutput(index=index, text=text, token_ids=(1, 2), finish_reason="length")


def test_text_is_that_of_the_first_answer() -> None:
    output = RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=(3,),
        outputs=(answer(0, "one"), answer(1, "two")),
        times=RequestTimes(queued=0.0, first_token=None, finished=None),
    )
    assert output.text == "one"
    assert output.num_cached_tokens == 0


def test_outputs_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        answer(0, "a").text = "b"  # type: ignore[misc]
