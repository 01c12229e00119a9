"""Logits that are not finite end the requests that they are of, in words; others are answered as if alone."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamina import BeamSearchParams, LogitsError, Runtime, SamplingParams

BREAKING = 7  # the token that breaks the logits of whatever has it
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
BROKEN = [math.nan, math.inf, -math.inf]
KINDS = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 3},
    "adjusted": {"presence_penalty": 1.0, "repetition_penalty": 1.2},
    "typical": {"temperature": 1.0, "typical_p": 0.5, "seed": 1},
    "excluded": {"allowed_token_ids": range(0, 320, 2), "bad_words": [[5], [9]]},
    "with least": {"min_tokens": 3, "stop_token_ids": [3, 4]},
    "reported": {"logprobs": 2},
    "processed": {"logits_processors": [lambda prompt, answer, logits: torch.nan_to_num(logits)]},
}


@pytest.fixture(scope="module")
def changed(tmp_path_factory, tiny_folder):
    """changed(name, place, value): TINY with that value in a weight."""

    def make(name, place, value):
        folder = tmp_path_factory.mktemp("broken") / "tiny"
        shutil.copytree(tiny_folder, folder)
        weights = load_file(folder / "model.safetensors")
        weights[name][place] = value
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


@pytest.fixture(scope="module", params=["eager", "captured"])
def runtime(request, changed, tiny_folder, compile_cache):
    """A runtime that has NaN after one token: op by op, or by call graphs of compiled code."""
    settings = {"compile": request.param == "captured", "cache_dir": compile_cache}
    Runtime.from_pretrained(tiny_folder, **settings).close()  # code is verified with weights that are sound
    folder = changed("model.embed_tokens.weight", (BREAKING, 3), math.nan)
    with Runtime.from_pretrained(folder, **settings) as runtime:
        yield runtime


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_request_ends_with_an_error_and_the_stream_beside_it_is_whole(runtime, is_idle, kind):
    params = SamplingParams(**GREEDY | KINDS[kind])
    alone = runtime.generate([[5, 6]], SamplingParams(**GREEDY | {"max_tokens": 30}))[0].outputs[0].token_ids
    canary = runtime.stream([5, 6], SamplingParams(**GREEDY | {"max_tokens": 30}))
    told = [next(canary)]
    for prompt in ([1, BREAKING], [BREAKING, *range(10, 30)]):
        with pytest.raises(LogitsError, match=r"the logits are not finite \(NaN.*lamina verify"):
            runtime.generate([prompt], params)
        told.append(next(canary))
    told.extend(canary)
    assert tuple(id_ for delta in told for id_ in delta.token_ids) == alone
    is_idle(runtime)


def test_a_stream_that_breaks_in_its_middle_tells_what_came_before(runtime, is_idle):
    force = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logit_bias={BREAKING: 100})
    stream = runtime.stream([5, 6], force)
    assert next(stream).token_ids == (BREAKING,)
    with pytest.raises(LogitsError):
        list(stream)
    is_idle(runtime)


def test_tokens_come_as_ever_up_to_the_one_that_breaks(tiny_folder, changed, open_runtime):
    greedy = SamplingParams(**GREEDY | {"max_tokens": 30})
    answer = open_runtime(tiny_folder).generate([[5, 6]], greedy)[0].outputs[0].token_ids
    place = next(i for i in range(2, 30) if answer[i] not in (*answer[:i], 5, 6))
    stream = open_runtime(changed("model.embed_tokens.weight", answer[place], math.nan)).stream(
        [5, 6], greedy
    )
    assert tuple(next(stream).token_ids[0] for _ in range(place + 1)) == answer[: place + 1]
    with pytest.raises(LogitsError):
        list(stream)


def test_of_many_requests_of_one_step_the_broken_ones_end(runtime, is_idle):
    params = SamplingParams(**GREEDY)
    prompts = [[5, 6], [BREAKING], [8, 9, 10], [4, BREAKING, 4]]
    streams = [runtime.stream(prompt, params) for prompt in prompts]
    ends = []
    for stream in streams:
        try:
            ends.append(sum(len(delta.token_ids) for delta in stream))
        except LogitsError:
            ends.append("broken")
    assert ends == [8, "broken", 8, "broken"]
    is_idle(runtime)


def test_a_beam_search_that_meets_them_ends_with_the_error(runtime, is_idle):
    with pytest.raises(LogitsError):
        runtime.beam_search([[BREAKING]], BeamSearchParams(beam_width=2, max_tokens=3))
    assert runtime.beam_search([[5]], BeamSearchParams(beam_width=2, max_tokens=3))[0].outputs
    is_idle(runtime)


def test_log_probabilities_of_a_prompt_are_numbers_or_an_error(runtime, is_idle):
    params = SamplingParams(**GREEDY, prompt_logprobs=1)
    with pytest.raises(LogitsError):
        runtime.generate([[5, BREAKING, 6]], params)
    found = runtime.generate([[5, 4, 6]], params)[0].prompt_logprobs
    assert all(one.logprob > -100 for report in found[1:] for one in report.values())
    is_idle(runtime)


@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("where", ["embedding", "norm", "one row of the head", "all of the head"])
def test_wherever_a_weight_is_not_finite_no_token_is_made_up(changed, open_runtime, value, where):
    name, place = {
        "embedding": ("model.embed_tokens.weight", slice(None)),
        "norm": ("model.layers.1.input_layernorm.weight", slice(2, 3)),
        "one row of the head": ("lm_head.weight", slice(11, 12)),
        "all of the head": ("lm_head.weight", slice(None)),
    }[where]
    runtime = open_runtime(changed(name, place, value))
    with pytest.raises(LogitsError):
        runtime.generate([[3, 4]], SamplingParams(temperature=0.0, max_tokens=4))


def test_a_request_that_excludes_every_token_is_told_that_it_may_be_that(open_runtime):
    params = SamplingParams(**GREEDY, allowed_token_ids=[5], bad_words=[[5, 5]])
    with pytest.raises(LogitsError, match="or what the request excludes leaves no token"):
        open_runtime().generate([[3]], params)
