"""Several answers to one prompt: drawn apart, repeatable, delivered whole, each with an end of its own."""

import dataclasses
import itertools

import pytest

from lamina import RequestError, SamplingParams

DRAWN = SamplingParams(temperature=1.0, seed=1, max_tokens=10, ignore_eos=True)
PROMPT = [(17 * place) % 320 for place in range(33)]


def tokens(output):
    return [answer.token_ids for answer in output.outputs]


def of(params, **changes):
    return dataclasses.replace(params, **changes)


def by_index(deltas):
    """The deltas of each answer."""
    found = {}
    for delta in deltas:
        found.setdefault(delta.index, []).append(delta)
    return found


def test_answers_differ_and_come_again_and_the_first_is_what_one_alone_would_be(open_runtime):
    runtime = open_runtime()
    output = runtime.generate([PROMPT], of(DRAWN, n=4))[0]
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
    assert len(set(tokens(output))) == 4
    assert tokens(runtime.generate([PROMPT], of(DRAWN, n=4))[0]) == tokens(output)
    assert tokens(runtime.generate([PROMPT], of(DRAWN, n=2))[0]) == tokens(output)[:2]
    assert tokens(runtime.generate([PROMPT], DRAWN)[0]) == tokens(output)[:1]
    greedy = runtime.generate([PROMPT], of(DRAWN, n=3, temperature=0))[0]
    assert len(set(tokens(greedy))) == 1


def test_no_answer_of_one_seed_is_an_answer_of_the_next(open_runtime):
    runtime = open_runtime()
    params = [of(DRAWN, n=3, seed=seed) for seed in range(-2, 3)]
    drawn = [answer for output in runtime.generate([PROMPT] * 5, params) for answer in tokens(output)]
    assert len(set(drawn)) == 15
    unseeded = runtime.generate([PROMPT] * 3, of(DRAWN, n=3, seed=None))
    assert len({answer for output in unseeded for answer in tokens(output)}) == 9


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63)])
def test_the_largest_and_the_smallest_seed_have_children_too(open_runtime, seed):
    assert len(set(tokens(open_runtime().generate([PROMPT], of(DRAWN, n=3, seed=seed))[0]))) == 3


def three_lengths(runtime):
    """Parameters whose three answers end at an EOS after different numbers of tokens."""
    for seed in itertools.count():
        params = SamplingParams(temperature=1.0, n=3, seed=seed, max_tokens=20)
        output = runtime.generate([[0]], params)[0]
        if len({len(answer.token_ids) for answer in output.outputs}) == 3:
            return params, output
    raise AssertionError


def test_each_answer_runs_to_its_own_end_and_says_once_why(scripted, worded):
    tokenizer, (one, two) = worded("one", "two")
    logits = [-30.0] * 320
    logits[2], logits[one], logits[two] = 0.0, 1.0, 1.0
    runtime = scripted([logits], tokenizer=tokenizer)
    params, output = three_lengths(runtime)
    assert [answer.finish_reason for answer in output.outputs] == ["stop"] * 3
    assert all(answer.token_ids[-1] == 2 for answer in output.outputs)
    streamed = by_index(runtime.stream([0], params))
    assert sorted(streamed) == [0, 1, 2]
    for index, deltas in streamed.items():
        answer = output.outputs[index]
        assert "".join(delta.text for delta in deltas) == answer.text
        assert tuple(token for delta in deltas for token in delta.token_ids) == answer.token_ids
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    assert len({delta.request_id for deltas in streamed.values() for delta in deltas}) == 1


@pytest.mark.parametrize("settings", [{}, {"prefill_chunk": 5}, {"num_kv_blocks": 13}], ids=str)
def test_answers_come_out_alike_alone_among_others_in_chunks_and_after_preemption(open_runtime, settings):
    right = tokens(open_runtime(dtype="float64").generate([PROMPT], of(DRAWN, n=3))[0])
    runtime = open_runtime(dtype="float64", block_size=4, **settings)
    outputs = runtime.generate([[7], PROMPT, PROMPT[:9]], [of(DRAWN, n=2), of(DRAWN, n=3), DRAWN])
    assert tokens(outputs[1]) == right
    assert (outputs[1].num_preemptions + outputs[2].num_preemptions > 0) == ("num_kv_blocks" in settings)


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_answers_share_the_full_blocks_of_their_prompt(open_runtime, prompt_logprobs):
    """Nothing is copied: what is shared is never written, and the rest is fewer tokens than a block has."""
    runtime = open_runtime(block_size=16)
    stream = runtime.stream(PROMPT, of(DRAWN, n=4, prompt_logprobs=prompt_logprobs))
    deltas = [next(stream)]
    assert runtime.stats()["blocks"]["used"] == 2 + 4
    num_looked_up = 4 if prompt_logprobs is None else 3  # whose prompt is reported needs all of it computed
    found = runtime.stats()["prefix_cache"]
    assert found == {"queried_tokens": num_looked_up * 33, "hit_tokens": 3 * 32}
    told = [delta.prompt_logprobs for delta in (*deltas, *stream)]
    assert [len(prompt) for prompt in told if prompt is not None] == ([] if prompt_logprobs is None else [33])


def test_without_a_prefix_cache_answers_are_the_same(open_runtime):
    shared, apart = open_runtime(), open_runtime(prefix_cache=False)
    assert tokens(shared.generate([PROMPT], of(DRAWN, n=3))[0]) == tokens(
        apart.generate([PROMPT], of(DRAWN, n=3))[0]
    )


def test_an_answer_that_is_aborted_leaves_the_others_alone(open_runtime, is_idle):
    runtime = open_runtime()
    right = tokens(runtime.generate([PROMPT], of(DRAWN, n=3))[0])
    stream = runtime.stream(PROMPT, of(DRAWN, n=3))
    deltas = [next(stream) for _ in range(4)]
    name = deltas[0].request_id
    assert runtime._client.abort(f"{name}-1")
    found = by_index([*deltas, *stream])
    assert [found[index][-1].finish_reason for index in range(3)] == ["length", "abort", "length"]
    for index in (0, 2):
        assert tuple(token for delta in found[index] for token in delta.token_ids) == right[index]
    is_idle(runtime)


@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_stream_that_is_left_gives_up_all_its_answers(open_runtime, is_idle, end):
    runtime = open_runtime()
    stream = runtime.stream(PROMPT, of(DRAWN, n=3))
    next(stream)
    if end == "close":
        stream.close()
    del stream
    is_idle(runtime)


def test_of_best_of_those_come_whose_tokens_are_likeliest_on_average(scripted):
    """They end after different numbers of tokens, so that a sum would prefer the short ones."""
    logits = [-30.0] * 320
    logits[2], logits[40], logits[41] = 0.0, 2.5, 1.0
    runtime = scripted([logits])
    for seed in range(50):
        everyone = SamplingParams(temperature=1.0, n=8, seed=seed, max_tokens=9, logprobs=0)
        answers = runtime.generate([[0]], everyone)[0].outputs
        ranked = sorted(answers, key=lambda answer: -answer.cumulative_logprob / len(answer.token_ids))
        by_sum = sorted(answers, key=lambda answer: -answer.cumulative_logprob)
        if [a.token_ids for a in ranked[:3]] != [a.token_ids for a in by_sum[:3]]:
            break
    else:
        raise AssertionError("no seed told the two apart")
    best = runtime.generate([[0]], of(everyone, n=3, best_of=8, logprobs=None))[0]
    assert tokens(best) == [answer.token_ids for answer in ranked[:3]]
    assert [answer.index for answer in best.outputs] == [0, 1, 2]
    assert all(answer.logprobs is None for answer in best.outputs)
    assert [a.cumulative_logprob for a in best.outputs] == [a.cumulative_logprob for a in ranked[:3]]
    assert runtime.generate([[0]], of(everyone, n=3, best_of=3))[0].outputs == answers[:3]


def test_what_cannot_be_is_refused_by_name(open_runtime):
    runtime = open_runtime()
    with pytest.raises(RequestError, match=r"^best_of is 2; wanted an integer, n \(3\) or more"):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(RequestError, match=r"best_of is 4, above n 2; wanted none in a stream"):
        runtime.stream(PROMPT, of(DRAWN, n=2, best_of=4))


def test_a_deadline_ends_every_answer_with_what_it_has(open_runtime):
    runtime = open_runtime()
    output = runtime.generate([PROMPT], of(DRAWN, n=2, max_tokens=None), timeout=1e-6)[0]
    assert [(a.finish_reason, a.stop_reason) for a in output.outputs] == [("abort", "deadline")] * 2
    assert output.times.first_token is None


def test_a_processor_that_fails_in_one_answer_ends_the_call_and_leaves_nothing(open_runtime, is_idle):
    def fail_late(prompt, answer, logits):
        if len(answer) == 4:
            raise KeyError("lost")
        return logits

    runtime = open_runtime()
    params = of(DRAWN, n=3, logits_processors=[fail_late])
    with pytest.raises(RequestError, match=r"logits_processors\[0\] raised KeyError"):
        runtime.generate([PROMPT], params)
    is_idle(runtime)
    with pytest.raises(RequestError, match=r"logits_processors\[0\] raised KeyError"):
        list(runtime.stream(PROMPT, params))
    is_idle(runtime)


def test_times_and_counts_are_those_of_all_answers(open_runtime):
    runtime = open_runtime()
    output = runtime.generate([PROMPT], of(DRAWN, n=3))[0]
    assert output.times.queued <= output.times.first_token <= output.times.finished
    assert output.num_cached_tokens == 0
    assert runtime.stats()["requests"]["finished"] == 3
