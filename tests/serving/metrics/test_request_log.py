"""What a line of the request log says of parameters: all that were chosen, and text where it is wanted."""

import dataclasses
import json
from typing import Any

import pytest

from lamina.runtime.sampling_params import SamplingParams
from lamina.runtime.structured_outputs import KINDS, StructuredOutputs
from lamina.serving.metrics.request_log import chosen

SECRET = "blue whale"
FORM = StructuredOutputs(json_object=True)
CHOSEN: dict[str, Any] = {  # of every parameter that a request may bring, a value that is not its default
    "n": 2,
    "best_of": 2,
    "logprobs": 1,
    "prompt_logprobs": 1,
    "max_tokens": 9,
    "min_tokens": 1,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.1,
    "typical_p": 0.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 2.0,
    "seed": 7,
    "logit_bias": {5: 1.0},
    "allowed_token_ids": [5, 6],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "detokenize": True,
    "stop": SECRET,
    "bad_words": [SECRET],
    "structured_outputs": FORM,
}
OBJECTS = {"logits_processors"}  # of a caller in the same process; no request over HTTP has any
FORMS: list[dict[str, Any]] = [
    {"json": {"const": SECRET}},
    {"json": True},
    {"regex": SECRET},
    {"choice": ["a", SECRET]},
    {"grammar": f'start: "{SECRET}"'},
    {"json_object": True, "reasoning_end": SECRET},
    {"json_object": True, "reasoning_begin": SECRET, "reasoning_end": SECRET},
]


def written(params: SamplingParams, *, with_text: bool) -> str:
    """The parameters as a line of log has them."""
    return json.dumps(chosen(params, with_text=with_text), default=list)


@pytest.mark.parametrize("with_text", [False, True])
@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_every_parameter_can_be_written(name: str, with_text: bool) -> None:
    if name in OBJECTS:
        return
    line = json.loads(written(SamplingParams(**{name: CHOSEN[name]}), with_text=with_text))
    assert name in line


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_told_by_its_kind_and_its_text_where_that_is_wanted(form: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(**form))
    bare, whole = (written(params, with_text=with_text) for with_text in (False, True))
    kind = next(name for name in form if name in KINDS)
    for line in (bare, whole):
        assert kind in json.loads(line)["structured_outputs"]
    assert SECRET not in bare
    assert (SECRET in whole) == (SECRET in json.dumps(form))


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_text_of_a_parameter_is_told_where_that_is_wanted(name: str) -> None:
    params = SamplingParams(**{name: CHOSEN[name]})
    assert SECRET not in written(params, with_text=False)
    assert SECRET in written(params, with_text=True)
