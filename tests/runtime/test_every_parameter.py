"""Every sampling parameter in every way of serving: it has its effect, and the same one everywhere."""

import dataclasses
import functools
from typing import NamedTuple

import pytest
import torch

from lamina import CompileConfig, RequestError, Runtime, SamplingParams, StructuredOutputs
from lamina.runtime.startup import engine_builder

PROMPT = "the end of the beginning"
PLAIN = {"temperature": 1.0, "top_k": 8, "seed": 11, "max_tokens": 10, "ignore_eos": True}
FEW = {"allowed_token_ids": range(40, 44)}  # so that they come again
EOS = 2


class Answer(NamedTuple):
    """What a caller sees of an answer."""

    token_ids: tuple
    text: str
    finish_reason: str
    stop_reason: object
    others: tuple = ()  # of the same prompt
    told: tuple = ()  # whose log-probabilities come with each token
    told_of_prompt: tuple = ()


def turn(prompt, answer, logits):
    """A processor that depends on everything it is given."""
    return logits.roll(len(answer)) * (-1) ** len(prompt)


# Of the plain answer, for each parameter: what is given without it, and what it is.
CASES = {
    "max_tokens": lambda plain: ({}, 3),
    "min_tokens": lambda plain: ({"stop_token_ids": range(150)}, 6),
    "temperature": lambda plain: ({}, 0.0),
    "top_k": lambda plain: ({}, 1),
    "top_p": lambda plain: ({}, 0.05),
    "min_p": lambda plain: ({}, 0.95),
    "typical_p": lambda plain: ({"top_k": 0}, 0.2),
    "presence_penalty": lambda plain: (FEW, 2.0),
    "frequency_penalty": lambda plain: (FEW, 2.0),
    "repetition_penalty": lambda plain: (FEW, 3.0),
    "logit_bias": lambda plain: ({}, {9: 100.0}),
    "allowed_token_ids": lambda plain: ({}, range(40, 60)),
    "bad_words": lambda plain: ({}, [plain.token_ids[2:4], plain.token_ids[:1]]),
    "structured_outputs": lambda plain: ({"ignore_eos": False}, StructuredOutputs(regex="[a-z]{1,9}![0-9]+")),
    "logits_processors": lambda plain: ({}, [turn]),
    "seed": lambda plain: ({}, 12),
    "stop": lambda plain: ({}, plain.text[4:6]),
    "stop_token_ids": lambda plain: ({}, plain.token_ids[3:4]),
    "ignore_eos": lambda plain: ({"logit_bias": {EOS: 100}}, False),
    "include_stop_str_in_output": lambda plain: ({"stop": plain.text[4:6]}, True),
    "skip_special_tokens": lambda plain: ({"logit_bias": {EOS: 100}}, False),
    "detokenize": lambda plain: ({}, False),
    "n": lambda plain: ({}, 3),
    "best_of": lambda plain: ({"n": 2}, 5),
    "logprobs": lambda plain: ({}, 2),
    "prompt_logprobs": lambda plain: ({}, 1),
}
MODES = {
    "batched": {},
    "compiled": {"compile": True},
    "captured": {"compile": CompileConfig(cuda_graphs="on"), "max_num_seqs": 32},
    "chunked": {"prefill_chunk": 3, "max_num_batched_tokens": 16},
    "preempted": {"num_kv_blocks": 24},
    "prefix hit": {},
    "two in flight": {},
}


def ask(runtime, settings):
    """The answers to the prompt with each of these settings."""
    outputs = runtime.generate([PROMPT] * len(settings), [SamplingParams(**own) for own in settings])
    return [seen(output) for output in outputs]


def seen(output):
    """What of an output a parameter may change; log-probabilities themselves have a test of their own."""
    first, *others = output.outputs
    return Answer(
        *(tuple(first.token_ids), first.text, first.finish_reason, first.stop_reason),
        others=tuple((tuple(other.token_ids), other.text) for other in others),
        told=tuple(map(tuple, first.logprobs or ())),
        told_of_prompt=tuple(map(tuple, (output.prompt_logprobs or ())[1:])),
    )


@pytest.fixture(scope="module")
def open_mode(tiny_text_folder, compile_cache):
    def make(**settings):
        given = {"compile": False, "block_size": 4, "num_kv_blocks": 400, "cache_dir": compile_cache}
        return Runtime.from_pretrained(tiny_text_folder, device="cpu", **given | settings)

    return make


@pytest.fixture(scope="module")
def alone(open_mode):
    """alone(name) -> the answers without a parameter and with it, and all settings with it."""
    with open_mode() as runtime:
        (plain,) = ask(runtime, [PLAIN])
        found = {}
        for name, case in CASES.items():
            without, value = case(plain)
            settings = PLAIN | without | {name: value}
            found[name] = *ask(runtime, [PLAIN | without]), *ask(runtime, [settings]), settings
    return found


@pytest.fixture(scope="module")
def served(open_mode, alone):
    """served(mode) -> the answers of all parameters in that mode, and the runtime's figures."""

    @functools.cache
    def serve(mode):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(engine_builder.DEPTHS, "cpu", 2 if mode == "two in flight" else 1)
            with open_mode(**MODES[mode]) as runtime:
                if mode == "prefix hit":
                    ask(runtime, [PLAIN])
                by_host = {name for name in alone if "logits_processors" in alone[name][2]}
                answers = {}
                for names in (
                    alone.keys() - by_host,
                    by_host,
                ):  # these keep a second step from being launched
                    names = sorted(names)
                    answers |= dict(zip(names, ask(runtime, [alone[name][2] for name in names]), strict=True))
                return answers, runtime.stats()

    return serve


def test_every_parameter_is_here():
    assert {field.name for field in dataclasses.fields(SamplingParams)} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_parameter_changes_the_answer(alone, name):
    without, with_it, _ = alone[name]
    assert with_it != without


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_a_parameter_has_the_same_effect_everywhere(alone, served, name, mode):
    answers, _ = served(mode)
    assert answers[name] == alone[name][1]


@pytest.mark.parametrize("mode", ["compiled", "captured"])
def test_a_parameter_comes_and_goes_from_one_batch_to_the_next(open_mode, alone, mode):
    plain = alone["top_k"][0]
    with open_mode(**MODES[mode]) as runtime:
        assert ask(runtime, [PLAIN]) == [plain]
        for _, with_it, settings in alone.values():
            assert ask(runtime, [settings]) == [with_it]
            assert ask(runtime, [PLAIN]) == [plain]


def test_the_modes_are_what_they_are_called(served):
    stats = {mode: served(mode)[1] for mode in MODES}
    assert stats["preempted"]["preemptions"] > 0
    assert stats["captured"]["cuda_graphs"]["replays"] > 0
    assert stats["prefix hit"]["prefix_cache"]["hit_tokens"] > stats["chunked"]["prefix_cache"]["hit_tokens"]


def test_a_processor_that_fails_ends_its_own_request_alone(open_mode, alone):
    def fail_late(prompt, answer, logits):
        if len(answer) == 3:
            raise KeyError("lost")
        return logits

    with open_mode() as runtime:
        stream = runtime.stream(PROMPT, SamplingParams(**PLAIN))
        first = next(stream)
        for processor, message in [
            (fail_late, r"logits_processors\[0\] raised KeyError\('lost'\)"),
            (lambda prompt, answer, logits: logits[:-1], r"returned \[\d+\]; wanted a tensor \[\d+\]"),
            (lambda prompt, answer, logits: None, "returned None; wanted"),
            (lambda prompt, answer, logits: logits * torch.nan, "returned NaN or infinity; wanted"),
            (lambda prompt, answer, logits: logits + torch.inf, "returned NaN or infinity; wanted"),
            (lambda prompt, answer, logits: logits - torch.inf, "returned -inf for every token; wanted"),
        ]:
            with pytest.raises(RequestError, match=message):
                runtime.generate([PROMPT], SamplingParams(**PLAIN, logits_processors=[processor]))
        text = first.text + "".join(delta.text for delta in stream)
        assert text == alone["max_tokens"][0].text
        assert runtime.stats()["blocks"]["used"] == 0


def test_processors_see_what_was_said_and_what_is_excluded(open_mode, alone):
    seen = []

    def watch(prompt, answer, logits):
        seen.append((len(prompt), answer, float(logits[5]), str(logits.dtype)))
        return logits.fill_(0.0)

    with open_mode() as runtime:
        settings = {"logits_processors": [watch], "bad_words": [[5]], "stop_token_ids": [5], "min_tokens": 4}
        (answer,) = ask(runtime, [PLAIN | settings])
    assert [said for _, said, _, _ in seen] == [answer.token_ids[:n] for n in range(len(seen))]
    assert {(excluded, dtype) for _, _, excluded, dtype in seen} == {(float("-inf"), "torch.float32")}
    assert 5 not in answer.token_ids[:4]
