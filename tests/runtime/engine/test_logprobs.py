"""Log-probabilities: those of transformers however a request is served, finite, and free where unwanted."""

import dataclasses
import json
from unittest.mock import patch

import pytest
import torch

from lamina import CompileConfig, RequestError, Runtime, SamplingParams
from lamina.common.errors import EngineError
from lamina.runtime.startup import engine_builder
from lamina.runtime.worker import logprobs as worker_logprobs

NUM_TOP, NUM_PROMPT_TOP = 4, 2
PROMPTS = [[5], [1, 2, 3], [300, 3] * 20, [(17 * place) % 320 for place in range(70)]]
WANTED = SamplingParams(
    temperature=0.9,
    top_k=30,
    seed=7,
    max_tokens=12,
    ignore_eos=True,
    logprobs=NUM_TOP,
    prompt_logprobs=NUM_PROMPT_TOP,
)
PLAIN = SamplingParams(temperature=0.9, top_k=30, seed=7, max_tokens=12, ignore_eos=True)
WAYS_TO_SERVE = [
    {},
    {"prefill_chunk": 1},
    {"prefill_chunk": 7, "block_size": 4},
    {"max_num_batched_tokens": 9, "prefix_cache": False},
    {"num_kv_blocks": 35, "block_size": 4, "prefill_chunk": 2},  # the long prompt is preempted half way
    {"num_kv_blocks": 35, "block_size": 4, "prefill_chunk": 2, "depth": 2},
    {"depth": 3},
]


@pytest.fixture(scope="module")
def oracle(tiny_folder, tiny_reference):
    """oracle(token ids) -> log-probabilities of every token after each of them, [T, vocab], in float32."""

    def run(ids):
        with torch.inference_mode():
            return tiny_reference(tiny_folder)(torch.tensor([ids])).logits[0].log_softmax(-1)

    return run


def check_entry(entry, token, row, num_top):
    """What is told of a token agrees with the oracle's row, up to the rounding of float32."""
    assert next(iter(entry)) == token
    assert num_top <= len(entry) <= num_top + 1
    best = row.sort(descending=True).values
    for place, (token_id, told) in enumerate(entry.items()):
        assert told.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        if place > 0 or len(entry) == num_top:
            assert told.logprob >= float(best[num_top - 1]) - 1e-4 if num_top else True
        assert (
            int((row > told.logprob + 1e-4).sum()) < told.rank <= 1 + int((row > told.logprob - 1e-4).sum())
        )
    ranks = [told.rank for told in list(entry.values())[1:]]
    assert ranks == sorted(ranks)


def check_output(output, oracle):
    answer, prompt = output.outputs[0], output.prompt_token_ids
    rows = oracle([*prompt, *answer.token_ids])
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for place in range(1, len(prompt)):
        check_entry(output.prompt_logprobs[place], prompt[place], rows[place - 1], NUM_PROMPT_TOP)
    assert len(answer.logprobs) == len(answer.token_ids) == 12
    for place, token in enumerate(answer.token_ids):
        check_entry(answer.logprobs[place], token, rows[len(prompt) + place - 1], NUM_TOP)
    own = [entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(own))


@pytest.mark.parametrize("settings", WAYS_TO_SERVE, ids=str)
def test_they_are_the_log_softmax_of_transformers_however_requests_are_served(open_runtime, oracle, settings):
    settings = dict(settings)
    with patch.dict(engine_builder.DEPTHS, cpu=settings.pop("depth", 1)):
        runtime = open_runtime(**settings)
    others = [runtime.generate([prompt], PLAIN)[0].outputs[0].token_ids for prompt in PROMPTS]
    outputs = runtime.generate([*PROMPTS, PROMPTS[3]], [WANTED] * 4 + [PLAIN])
    assert (outputs[3].num_preemptions > 0) == ("num_kv_blocks" in settings)
    for output in outputs[:4]:
        check_output(output, oracle)
    assert [output.outputs[0].token_ids for output in outputs] == [*others, others[3]]
    assert (outputs[4].outputs[0].logprobs, outputs[4].prompt_logprobs) == (None, None)
    assert outputs[4].outputs[0].cumulative_logprob is None


def test_compiled_and_captured_they_are_the_same(open_runtime, oracle, compile_cache):
    config = CompileConfig(cuda_graphs="on")
    runtime = open_runtime(compile=config, cache_dir=compile_cache, max_num_seqs=4)
    before = runtime.stats()["cuda_graphs"]["replays"]
    for output in runtime.generate(PROMPTS, WANTED):
        check_output(output, oracle)
    assert runtime.stats()["cuda_graphs"]["replays"] > before
    assert runtime.stats()["cuda_graphs"]["eager_steps"] == 0


def test_alone_and_in_any_company_they_are_told_alike(open_runtime):
    runtime = open_runtime(dtype="float64")
    alone = [runtime.generate([prompt], WANTED)[0] for prompt in PROMPTS]
    for one, other in zip(alone, runtime.generate(PROMPTS, WANTED), strict=True):
        told, again = one.outputs[0].logprobs, other.outputs[0].logprobs
        for entry, same in zip(told, again, strict=True):
            assert list(entry) == list(same)
            assert [x.logprob for x in entry.values()] == pytest.approx([x.logprob for x in same.values()])
        assert [list(entry) for entry in one.prompt_logprobs[1:]] == [
            list(entry) for entry in other.prompt_logprobs[1:]
        ]


def test_a_stream_tells_of_each_token_with_it_and_of_the_prompt_at_first(open_runtime):
    runtime = open_runtime(prefill_chunk=7)
    for prompt in PROMPTS:
        whole = runtime.generate([prompt], WANTED)[0]
        deltas = list(runtime.stream(prompt, WANTED))
        assert tuple(entry for delta in deltas for entry in delta.logprobs) == whole.outputs[0].logprobs
        assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
        assert [delta.prompt_logprobs for delta in deltas] == [whole.prompt_logprobs] + [None] * 11


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_a_prompt_that_is_in_the_cache_is_computed_again_where_it_is_to_be_told(open_runtime, length):
    runtime = open_runtime(block_size=16)
    prompt = PROMPTS[3][:length]
    first, second = (runtime.generate([prompt], WANTED)[0] for _ in range(2))
    assert first.num_cached_tokens == second.num_cached_tokens == 0
    assert len(second.prompt_logprobs) == length
    assert [None, *({token} for token in prompt[1:])] == [
        entry and {next(iter(entry))} for entry in second.prompt_logprobs
    ]
    for entry, same in zip(first.prompt_logprobs[1:], second.prompt_logprobs[1:], strict=True):
        assert list(entry) == list(same)
        assert [x.logprob for x in entry.values()] == pytest.approx([x.logprob for x in same.values()])
    only_answer = SamplingParams(temperature=0, max_tokens=2, logprobs=1)
    assert runtime.generate([prompt], only_answer)[0].num_cached_tokens == (length - 1) // 16 * 16


def test_they_are_of_the_model_alone_whatever_a_request_filters_and_fit_into_json(scripted):
    logits = [float("-inf")] * 320
    logits[5:8] = [3.0, 2.0, 1.0]
    runtime = scripted([logits])
    params = SamplingParams(temperature=0.3, top_k=1, min_p=0.5, max_tokens=2, logprobs=5, prompt_logprobs=5)
    output = runtime.generate([[0, 6, 9]], params)[0]
    right = torch.tensor([3.0, 2.0, 1.0]).log_softmax(0).tolist()
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    numbers = [[told.logprob for told in entry.values()] for entry in entries]
    json.dumps(numbers, allow_nan=False)
    assert list(entries[0]) == [6, 5, 7, 0, 1]
    assert numbers[0] == pytest.approx([right[1], right[0], right[2], -9999, -9999])
    assert (entries[1][9].logprob, entries[1][9].rank) == (-9999, 10)
    assert numbers[2] == numbers[3] == pytest.approx([*right, -9999, -9999])


ADJUSTMENTS = [
    {"logit_bias": {9: 100.0}},
    {"allowed_token_ids": [40, 41, 42], "repetition_penalty": 1.8},
    {"presence_penalty": 2.0, "frequency_penalty": 1.5, "typical_p": 0.4},
    {"logits_processors": [lambda prompt, answer, logits: -logits]},
    {"min_tokens": 12, "stop_token_ids": list(range(160))},
]


@pytest.mark.parametrize("depth", [1, 2])
def test_of_a_token_chosen_from_adjusted_logits_the_model_s_own_are_told(open_runtime, oracle, depth):
    with patch.dict(engine_builder.DEPTHS, cpu=depth):
        runtime = open_runtime()
    params = [dataclasses.replace(WANTED, **adjusted) for adjusted in ADJUSTMENTS]
    outputs = runtime.generate([PROMPTS[1]] * 5, params)
    for output, adjusted in zip(outputs, params, strict=True):
        check_output(output, oracle)
        silent = dataclasses.replace(adjusted, logprobs=None, prompt_logprobs=None)
        assert runtime.generate([PROMPTS[1]], silent)[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert set(outputs[0].outputs[0].token_ids) == {9}


def test_ids_that_the_tokenizer_has_not_are_no_part_of_the_distribution(scripted, bbpe_tokenizer):
    logits = [0.0] * 320
    logits[310], logits[45], logits[46] = 60.0, 30.0, 30.0
    runtime = scripted([logits], tokenizer=bbpe_tokenizer())
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2, prompt_logprobs=0)
    output = runtime.generate([[0, 310, 45]], params)[0]
    (entry,) = output.outputs[0].logprobs
    assert [told.logprob for told in entry.values()] == pytest.approx([-0.693147] * 2)
    assert output.prompt_logprobs[1][310].logprob == -9999
    assert output.prompt_logprobs[2][45].logprob == pytest.approx(-0.693147)


def test_each_token_is_told_with_its_text_where_there_is_text(scripted, worded):
    tokenizer, (hi, there) = worded("Hi", " there")
    runtime = scripted([hi, there, 2], tokenizer=tokenizer)
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=0, prompt_logprobs=0)
    output = runtime.generate([[0, hi]], params)[0]
    texts = [told.decoded_token for entry in output.outputs[0].logprobs for told in entry.values()]
    assert texts == [" there", "</s>"]
    assert output.prompt_logprobs[1][hi].decoded_token == "Hi"
    silent = SamplingParams(temperature=0, max_tokens=1, logprobs=0, detokenize=False)
    (entry,) = runtime.generate([[0]], silent)[0].outputs[0].logprobs
    assert entry[hi].decoded_token is None


@pytest.mark.parametrize("depth", [1, 2])
def test_there_are_as_many_as_tokens_where_a_stop_string_cuts_the_answer(scripted, worded, depth):
    tokenizer, ids = worded("DEF", "G", "HI", "J", "K")
    with patch.dict(engine_builder.DEPTHS, cpu=depth):
        runtime = scripted(ids, tokenizer=tokenizer)
    params = SamplingParams(temperature=0, max_tokens=12, stop=["HIJ"], logprobs=1)
    answer = runtime.generate([[0]], params)[0].outputs[0]
    assert (answer.text, [next(iter(entry)) for entry in answer.logprobs]) == ("DEFG", ids[:4])


def test_a_prompt_can_be_scored_with_one_token_and_not_with_none(open_runtime):
    runtime = open_runtime()
    with pytest.raises(RequestError, match=r"^max_tokens is 0; wanted an integer, at least 1"):
        SamplingParams(max_tokens=0, prompt_logprobs=1)
    scored = runtime.generate([PROMPTS[3]], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    assert len(scored.prompt_logprobs) == len(PROMPTS[3])
    assert {len(entry) for entry in scored.prompt_logprobs[1:]} == {1}


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_than_there_are_tokens_is_refused_and_all_of_them_are_told(open_runtime, name):
    runtime = open_runtime()
    with pytest.raises(RequestError, match=rf"^{name} is 321; wanted at most 320"):
        runtime.generate([[1, 2]], SamplingParams(**{name: 321}))
    output = runtime.generate([[1, 2]], SamplingParams(max_tokens=1, **{name: 320}))[0]
    told = output.outputs[0].logprobs[0] if name == "logprobs" else output.prompt_logprobs[1]
    assert len(told) == 320
    assert sum(torch.tensor([entry.logprob for entry in told.values()]).exp()) == pytest.approx(1)


def test_where_nobody_wants_them_nothing_is_computed_for_them(open_runtime, monkeypatch):
    def refuse(*_):
        raise AssertionError("computed in vain")

    runtime = open_runtime()
    monkeypatch.setattr(worker_logprobs, "top_logprobs", refuse)
    assert len(runtime.generate(PROMPTS, PLAIN)) == 4
    with pytest.raises(EngineError, match="in vain"):
        runtime.generate([[5], [6]], [PLAIN, WANTED])


def test_a_step_that_fails_costs_no_report_and_tells_none_twice(open_runtime, oracle, monkeypatch):
    runtime = open_runtime(prefill_chunk=9, block_size=4)
    stream, calls = runtime.stream(PROMPTS[3], WANTED), []
    report = worker_logprobs.top_logprobs

    def fail_once(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("once")
        return report(*arguments)

    monkeypatch.setattr(worker_logprobs, "top_logprobs", fail_once)
    deltas = [*stream]
    assert len(calls) > 4, "the step was tried again"
    told = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert len(told) == sum(len(delta.token_ids) for delta in deltas)
    assert sum(delta.prompt_logprobs is not None for delta in deltas) == 1
    output = runtime.generate([PROMPTS[3]], WANTED)[0]
    check_output(output, oracle)
    assert [entry.keys() for entry in told] == [entry.keys() for entry in output.outputs[0].logprobs]


def test_a_runtime_that_is_closed_with_reports_on_their_way_ends(tiny_folder):
    with Runtime.from_pretrained(tiny_folder, compile=False) as runtime:
        stream = runtime.stream(PROMPTS[3], WANTED)
        assert next(stream).prompt_logprobs is not None
