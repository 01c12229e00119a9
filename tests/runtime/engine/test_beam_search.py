"""Beam search: every sequence that transformers finds, the best of all by exhaustion, and no trace left."""

import itertools
import math
import time

import pytest
import torch

from lamina import BeamSearchParams, RequestError, Runtime
from lamina.runtime.engine.beam_search import BeamSearch

PROMPTS = [[5], [1, 2, 3], [(17 * place) % 320 for place in range(37)]]


def by_transformers(model, prompt, *, width, length, penalty=1.0, eos=None):
    """Token ids and scores of transformers' beams, the best first; the canonical search."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=length,
            length_penalty=penalty,
            early_stopping="never",
            eos_token_id=eos,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    found = []
    for ids, score in zip(output.sequences[:, len(prompt) :].tolist(), output.sequences_scores, strict=True):
        ends = [place for place, token in enumerate(ids) if token in (eos or ())]
        found.append((tuple(ids[: ends[0] + 1] if ends else ids), float(score)))
    return found


def scores(output, penalty):
    return [answer.cumulative_logprob / len(answer.token_ids) ** penalty for answer in output.outputs]


def common(outputs, count):
    """Tokens that beams have in their middle, so that as ids that stop they end some and not all."""
    middle = [answer.token_ids[len(answer.token_ids) // 2] for output in outputs for answer in output.outputs]
    return sorted({*middle}, key=lambda token: (-middle.count(token), token))[:count]


@pytest.mark.parametrize(
    "width, length, penalty, num_stops",
    [(2, 8, 1.0, 0), (4, 10, 0.0, 1), (3, 10, 1.0, 2), (4, 8, 2.0, 3), (3, 12, 0.5, 2)],
)
def test_beams_are_those_of_transformers(
    open_runtime, tiny_folder, tiny_reference, width, length, penalty, num_stops
):
    runtime = open_runtime(block_size=4)
    plain = BeamSearchParams(beam_width=width, max_tokens=length, ignore_eos=True)
    eos = common(runtime.beam_search(PROMPTS, plain), num_stops)
    params = BeamSearchParams(
        beam_width=width, max_tokens=length, length_penalty=penalty, ignore_eos=True, stop_token_ids=eos
    )
    outputs = runtime.beam_search(PROMPTS, params)
    ended = 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        right = by_transformers(
            tiny_reference(tiny_folder), prompt, width=width, length=length, penalty=penalty, eos=eos or None
        )
        assert [answer.token_ids for answer in output.outputs] == [ids for ids, _ in right]
        assert scores(output, penalty) == pytest.approx([score for _, score in right], abs=1e-4)
        ended += sum(answer.finish_reason == "stop" for answer in output.outputs)
    assert (ended > 0) == (num_stops > 0)


@pytest.mark.parametrize(
    "settings", [{"prefix_cache": False}, {"prefill_chunk": 3}, {"num_kv_blocks": 16}], ids=str
)
def test_they_are_the_same_however_they_are_served(open_runtime, settings):
    params = BeamSearchParams(beam_width=3, max_tokens=7, stop_token_ids=[41])
    right = open_runtime(dtype="float64").beam_search(PROMPTS, params)
    runtime = open_runtime(dtype="float64", block_size=4, **settings)
    outputs = runtime.beam_search(PROMPTS, params)
    for output, same in zip(outputs, right, strict=True):
        assert [answer.token_ids for answer in output.outputs] == [a.token_ids for a in same.outputs]


def test_the_beams_of_a_round_share_what_they_have_in_common(open_runtime):
    runtime = open_runtime(block_size=4)
    runtime.beam_search(PROMPTS[2], BeamSearchParams(beam_width=4, max_tokens=9, ignore_eos=True))
    found = runtime.stats()["prefix_cache"]
    assert found["queried_tokens"] - found["hit_tokens"] <= 37 + 8 * 4 * 4


# By definition: a model of few tokens, and all that it can write


VOCAB, STOP = 4, 3


def table(seed):
    """The log-probabilities of the next token after any tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = {}

    def after(ids):
        if ids not in rows:
            rows[ids] = (torch.randn(VOCAB, generator=generator) * 1.5).log_softmax(-1).tolist()
        return rows[ids]

    return after


def search(after, **settings):
    params = BeamSearchParams(stop_token_ids=[STOP], **settings)
    searched = BeamSearch(params, [], room=100, vocab_size=VOCAB)
    while searched.live:
        tops = []
        for beam in searched.live:
            row = after(beam.token_ids)
            order = sorted(range(VOCAB), key=lambda token, row=row: -row[token])
            tops.append([(token, row[token]) for token in order[: searched.num_top]])
        searched.advance(tops)
    return searched.best()


def everything(after, length, penalty):
    """All sequences there are, with their scores, the best first."""
    found = []
    for ids in itertools.product(range(VOCAB), repeat=length):
        if STOP in ids:
            ids = ids[: ids.index(STOP) + 1]
        total = sum(after(ids[:place])[token] for place, token in enumerate(ids))
        found.append((total / len(ids) ** penalty, ids))
    return sorted(set(found), reverse=True)


@pytest.mark.parametrize("penalty", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(5))
def test_wide_enough_it_finds_the_best_there_is(seed, penalty):
    after = table(seed)
    right = everything(after, 4, penalty)
    found = search(after, beam_width=81, max_tokens=4, length_penalty=penalty)
    assert [beam.token_ids for beam in found[:5]] == [ids for _, ids in right[:5]]


@pytest.mark.parametrize("seed", range(5))
def test_of_width_one_it_is_greedy_up_to_the_first_stop(seed):
    after, ids = table(seed), ()
    while len(ids) < 6 and STOP not in ids:
        row = after(ids)
        ids = (*ids, row.index(max(row)))
    (beam,) = search(after, beam_width=1, max_tokens=6, length_penalty=0.0)
    assert beam.token_ids == ids
    assert beam.finish_reason == ("stop" if ids[-1] == STOP else "length")


def test_it_ends_when_nothing_better_can_come():
    rounds = []
    certain = [math.log(0.001)] * 3 + [math.log(0.997)]

    def after(ids):
        rounds.append(len(ids))
        return certain

    found = search(after, beam_width=1, max_tokens=50, length_penalty=0.0)
    assert [beam.token_ids for beam in found] == [(STOP,)]
    assert rounds == [0]


def test_what_is_impossible_is_no_sequence():
    found = search(lambda ids: [0.0, -9999.0, -9999.0, -9999.0], beam_width=3, max_tokens=4)
    assert [beam.token_ids for beam in found] == [(0,) * 4]


# Parameters that are refused, and the rest


def test_text_reasons_and_lengths_are_told(scripted, worded):
    tokenizer, (hi, there, end) = worded("Hi", " there", "END")
    runtime = scripted([hi, there, end], tokenizer=tokenizer)
    output = runtime.beam_search([0], BeamSearchParams(beam_width=2, stop_token_ids=[end]))[0]
    assert output.text == "Hi there"
    best = output.outputs[0]
    assert (best.token_ids, best.finish_reason, best.stop_reason) == ((hi, there, end), "stop", end)
    assert [answer.index for answer in output.outputs] == [0, 1]
    short = runtime.beam_search([0], BeamSearchParams(beam_width=2, max_tokens=2))[0].outputs
    assert {(answer.finish_reason, len(answer.token_ids)) for answer in short} == {("length", 2)}


@pytest.mark.parametrize("settings", [{"max_model_len": 12}, {"num_kv_blocks": 4, "block_size": 4}], ids=str)
def test_the_context_and_the_cache_end_a_search(open_runtime, settings):
    runtime = open_runtime(**settings)
    outputs = runtime.beam_search([[5, 6]], BeamSearchParams(beam_width=2, ignore_eos=True))[0].outputs
    longest = 12 - 2 if "max_model_len" in settings else 12 + 1 - 2
    assert [(len(a.token_ids), a.finish_reason) for a in outputs] == [(longest, "length")] * 2


def test_a_deadline_ends_a_search_with_what_it_has(open_runtime, is_idle):
    runtime, now = open_runtime(), time.monotonic()
    core = runtime._loaded.core
    # a second passes with each step that is planned
    core.scheduler._clock = lambda: now + core.scheduler._in_flight.num_launched
    output = runtime.beam_search([[5]], BeamSearchParams(beam_width=2, ignore_eos=True), timeout=20.0)[0]
    assert 5 < len(output.outputs[0].token_ids) < 30
    assert {(a.finish_reason, a.stop_reason) for a in output.outputs} == {("abort", "deadline")}
    is_idle(runtime)


def test_an_interrupt_in_the_middle_leaves_nothing_running(open_runtime, is_idle, monkeypatch):
    from lamina.runtime.worker.model_runner import ModelRunner

    runtime, calls = open_runtime(), []
    execute = ModelRunner.execute

    def fail(self, plan):
        calls.append(plan)
        if len(calls) == 3:
            raise KeyboardInterrupt("once")
        return execute(self, plan)

    monkeypatch.setattr(ModelRunner, "execute", fail)
    with pytest.raises(KeyboardInterrupt, match="once"):
        runtime.beam_search(PROMPTS, BeamSearchParams(max_tokens=5))
    is_idle(runtime)


BAD = [
    ({"beam_width": 0}, "beam_width is 0; wanted an integer, at least 1"),
    ({"beam_width": None}, "beam_width is None"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"length_penalty": -1}, "length_penalty is -1; wanted a number, 0 to 10"),
    ({"length_penalty": 1e300}, "length_penalty is 1e\\+300; wanted a number, 0 to 10"),
    ({"length_penalty": None}, "length_penalty is None; wanted a number"),
    ({"stop_token_ids": ["x"]}, "stop_token_ids holds 'x'"),
    ({"ignore_eos": 1}, "ignore_eos is 1; wanted True or False"),
]


@pytest.mark.parametrize("wrong, message", BAD, ids=[message for _, message in BAD])
def test_what_cannot_be_is_refused_by_name(wrong, message):
    with pytest.raises(RequestError, match=message):
        BeamSearchParams(**wrong)


def test_a_bad_call_starts_nothing(tiny_folder, is_idle):
    with Runtime.from_pretrained(tiny_folder, compile=False) as runtime:
        with pytest.raises(RequestError, match=r"prompts\[1\]: prompt token 320"):
            runtime.beam_search([[1], [320]])
        with pytest.raises(RequestError, match="params is 5; wanted a BeamSearchParams"):
            runtime.beam_search([[1]], 5)
        with pytest.raises(RequestError, match="beam_width is 400; wanted at most 320"):
            runtime.beam_search([[1]], BeamSearchParams(beam_width=400))
        with pytest.raises(RequestError, match="stop_token_ids holds 320; wanted ids of the vocabulary"):
            runtime.beam_search([[1]], BeamSearchParams(stop_token_ids=[320]))
        is_idle(runtime)
        assert runtime.stats()["requests"]["finished"] == 0
