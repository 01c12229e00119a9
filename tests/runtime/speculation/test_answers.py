"""Speculated answers are those without: over any traffic, with drafts that are right, wrong or both."""

import random
from importlib.util import find_spec

import pytest
import torch

from lamina import NGram, Runtime, SamplingParams, StructuredOutputs
from lamina.compiler.execution.cuda_graphs import CudaGraphs
from lamina.runtime.scheduler.replay import replay
from lamina.runtime.startup import builder, captures, engine_builder

from .drafting import SCRIPTS, SETTINGS, Scripted, use

NARROW = {"num_kv_blocks": 40, "block_size": 4, "max_num_batched_tokens": 24, "prefill_chunk": 7}
FEATURES = [
    {},
    {"temperature": 0},
    {"temperature": 1.3, "top_k": 20, "seed": 4},
    {"top_p": 0.8, "min_p": 0.05, "seed": 5},
    {"logprobs": 2, "temperature": 0.7},
    {"prompt_logprobs": 1, "logprobs": 0},
    {"min_tokens": 9, "stop_token_ids": list(range(40, 120))},
    {"stop_token_ids": list(range(40, 70))},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3, "temperature": 0},
    {"logit_bias": {7: 4.0, 9: 4.0}, "seed": 8},
    {"bad_words": ["a"], "temperature": 0},
    {"allowed_token_ids": list(range(10, 60)), "seed": 9},
    {"typical_p": 0.6, "seed": 3},
    {"n": 3, "seed": 6},
    {"ignore_eos": True},
]
if find_spec("llguidance"):
    FEATURES += [
        {"structured_outputs": StructuredOutputs(regex="[a-z ]{5,30}"), "temperature": 0.8},
        {
            "structured_outputs": StructuredOutputs(regex="[ab]{4}once upon a time, the end[a-z]{9}"),
            "repetition_penalty": 1.2,
        },
    ]


def asked(seed):
    """Prompts that begin alike or repeat themselves, each with some feature."""
    lots = random.Random(seed)
    common = [lots.randrange(3, 300) for _ in range(9)]
    prompts, params = [], []
    for feature in FEATURES:
        own = [lots.randrange(3, 300) for _ in range(lots.randint(1, 12))]
        prompts.append([*common[: lots.choice([0, 9])], *own, *own[: lots.randint(0, len(own))]])
        params.append(SamplingParams(**{"max_tokens": lots.randint(1, 40), "seed": seed} | feature))
    return prompts, params


def said(outputs):
    return [
        (
            [
                (
                    one.token_ids,
                    one.text,
                    one.finish_reason,
                    one.stop_reason,
                    one.logprobs
                    and [{id_: round(own.logprob, 9) for id_, own in row.items()} for row in one.logprobs],
                )
                for one in output.outputs
            ],
            output.prompt_logprobs is not None,
        )
        for output in outputs
    ]


@pytest.fixture(scope="module")
def plain(tiny_text_folder):
    """Answers without drafts, to everything that is asked."""
    answers = {}
    with Runtime.from_pretrained(tiny_text_folder, **SETTINGS) as runtime:
        for seed in range(3):
            answers[seed] = runtime.generate(*asked(seed))
    return answers


def known(outputs):
    """Scripted answers: each prompt with all that comes after it."""
    return {
        (number, one.index): (*output.prompt_token_ids, *one.token_ids)
        for number, output in enumerate(outputs)
        for one in output.outputs
    }


@pytest.mark.parametrize("seed, depth, k", [(0, 1, 3), (1, 2, 3), (2, 3, 7)])
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_feature_is_the_same_at_every_position(
    tiny_text_folder, monkeypatch, plain, script, seed, depth, k, tmp_path
):
    drafter = Scripted(SCRIPTS[script])
    drafter.answers = known(plain[seed])
    use(monkeypatch, drafter, depth=depth)
    settings = SETTINGS | (NARROW if seed else {}) | {"record": tmp_path / "log"}
    with Runtime.from_pretrained(tiny_text_folder, speculative=NGram(k=k), **settings) as runtime:
        found = runtime.generate(*asked(seed))
        stats = runtime.stats()
        steps = runtime._loaded.core.scheduler._in_flight.num_launched
    assert said(found) == said(plain[seed])
    assert stats["blocks"]["used"] == 0
    counts = stats["speculation"]
    assert counts["draft_tokens"] > 0
    assert sum(counts["accepted_by_place"]) == counts["accepted_tokens"] <= counts["draft_tokens"]
    assert (counts["accepted_tokens"] == 0) == (script == "wrong")
    played = replay(tmp_path / "log")
    assert (played.difference, played.num_steps) == (None, steps)


@pytest.mark.parametrize("depth", [1, 2])
def test_captured_steps_with_drafts_come_to_the_same(tiny_text_folder, monkeypatch, plain, depth):
    """On a CPU a capture is the step itself on the memory of the capture, so that what is stale shows."""
    drafter = Scripted(SCRIPTS["alternating"])
    drafter.answers = known(plain[0])
    use(monkeypatch, drafter, depth=depth)
    monkeypatch.setattr(builder, "new_cuda_graphs", lambda resolved: CudaGraphs(resolved.device))
    monkeypatch.setattr(captures, "DECODE_SIZES", (1, 4, 6))
    with Runtime.from_pretrained(tiny_text_folder, speculative=NGram(k=3), **SETTINGS) as runtime:
        found = runtime.generate(*asked(0))
        graphs, counts = runtime.stats()["cuda_graphs"], runtime.stats()["speculation"]
    assert said(found) == said(plain[0])
    assert graphs["replays"] > graphs["eager_steps"]
    assert graphs["padded_tokens"] > 0
    assert counts["accepted_tokens"] > 0


def test_right_drafts_take_most_steps_away(tiny_folder, monkeypatch):
    def answered(speculative):
        with Runtime.from_pretrained(tiny_folder, speculative=speculative, **SETTINGS) as runtime:
            found = runtime.generate([[5, 6, 7]], params)
            return found, runtime._loaded.core.scheduler._in_flight.num_launched

    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    wanted, num_steps = answered(None)
    steps = {}
    for script in ("right", "wrong"):
        drafter = Scripted(SCRIPTS[script])
        drafter.answers = known(wanted)
        use(monkeypatch, drafter)
        found, steps[script] = answered(NGram(k=3))
        assert said(found) == said(wanted)
    assert steps["right"] < 20 < steps["wrong"] == num_steps == 60


@pytest.mark.parametrize("depth", [1, 2])
def test_ngrams_are_found_in_prompts_computed_or_cached(tiny_folder, monkeypatch, depth):
    monkeypatch.setattr("lamina.runtime.startup.engine_builder.DEPTHS", {"cpu": depth})
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    prompts = [[5, 6, 7, 8] * 6, [9, 10, 11] * 8]
    with Runtime.from_pretrained(tiny_folder, **SETTINGS) as runtime:
        wanted = runtime.generate(prompts, params)
        plain_steps = runtime._loaded.core.scheduler._in_flight.num_launched
    with Runtime.from_pretrained(tiny_folder, speculative=NGram(k=3), **SETTINGS) as runtime:
        assert said(runtime.generate(prompts, params)) == said(wanted)
        first = runtime._loaded.core.scheduler._in_flight.num_launched
        again = runtime.generate(prompts, params)
        assert [output.num_cached_tokens for output in again] != [0, 0]
        assert said(again) == said(wanted)
        assert runtime.stats()["speculation"]["accepted_tokens"] > 0
    assert first <= plain_steps


def test_tokens_at_a_temperature_are_distributed_as_without(tiny_folder, monkeypatch):
    """Drafts that are likely, so that many hold, do not make them likelier."""
    draws = [
        SamplingParams(temperature=1.0, top_k=4, seed=seed, max_tokens=3, ignore_eos=True)
        for seed in range(200)
    ]
    prompts = [[5, 6, 7]] * len(draws)
    with Runtime.from_pretrained(tiny_folder, **SETTINGS) as runtime:
        wanted = runtime.generate(prompts, draws)
        greedy = runtime.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    drafter = Scripted(SCRIPTS["right"])
    drafter.answers = known(greedy)
    use(monkeypatch, drafter)
    with Runtime.from_pretrained(tiny_folder, speculative=NGram(k=2), **SETTINGS) as runtime:
        found = runtime.generate(prompts, draws)
        counts = runtime.stats()["speculation"]
    assert said(found) == said(wanted)
    assert 0 < counts["accepted_tokens"] < counts["draft_tokens"]


@pytest.mark.parametrize("depth", [1, 2])
def test_an_id_that_stops_amid_drafts_that_hold_ends_the_answer_there(tiny_folder, monkeypatch, depth):
    prompt, greedy = [5, 6, 7], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with Runtime.from_pretrained(tiny_folder, **SETTINGS) as runtime:
        wanted = runtime.generate([prompt], greedy)
    tokens = wanted[0].outputs[0].token_ids
    drafter = Scripted(SCRIPTS["right"])
    drafter.answers = known(wanted)
    use(monkeypatch, drafter, depth=depth)
    with Runtime.from_pretrained(tiny_folder, speculative=NGram(k=7), **SETTINGS) as runtime:
        for place in (1, 5, 6, 7, 20, 39):
            params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[tokens[place]])
            (output,) = runtime.generate([prompt], params)
            answer, first = output.outputs[0], tokens.index(tokens[place])
            assert list(answer.token_ids) == list(tokens[: first + 1])
            assert (answer.finish_reason, answer.stop_reason) == ("stop", tokens[place])
        assert runtime.stats()["speculation"]["accepted_tokens"] > 10
        assert runtime.stats()["blocks"]["used"] == 0


@pytest.mark.parametrize("jump_forward", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_forms_are_kept_to_beside_drafts_of_others(tiny_text_folder, monkeypatch, depth, jump_forward):
    """Drafts of n-grams, whose rows with a form are masked after each."""
    pytest.importorskip("llguidance")
    monkeypatch.setitem(engine_builder.DEPTHS, "cpu", depth)
    forms = [StructuredOutputs(regex="(abc){2}[de]{3}once upon a time[0-9]{2}"), None, None]
    forms += [StructuredOutputs(choice=["once upon", "a time"]), None]
    params = [
        SamplingParams(temperature=0.7, top_k=3, seed=seed, max_tokens=40, structured_outputs=form)
        for seed, form in enumerate(forms)
    ]
    prompts = [[70, 71, 72, 73] * 6, [80, 81] * 9, [90] * 20, [70, 71] * 4, [99, 98, 97] * 7]
    answers, settings = [], SETTINGS | {"jump_forward": jump_forward}
    for speculative in (None, NGram(k=3, min_ngram=1)):
        with Runtime.from_pretrained(tiny_text_folder, speculative=speculative, **settings) as runtime:
            answers.append(said(runtime.generate(prompts, params)))
            counts = runtime.stats()["speculation"]
    assert answers[0] == answers[1]
    assert counts["draft_tokens"] > 0


@pytest.fixture(autouse=True)
def _few_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
