"""Requests served together get what each gets alone, whatever comes, goes, or runs short."""

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import Runtime, SamplingParams
from lamina.runtime.startup import engine_builder

WIDE = {"dtype": "float64", "compile": False}


def prompt(length, seed):
    return [(7 + 31 * seed + 13 * place * (seed + 1)) % 320 for place in range(length)]


def tokens(output):
    return list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def alone(tiny_folder):
    """alone(prompt, params) -> the output of a request that has the engine to itself."""
    with Runtime.from_pretrained(tiny_folder, **WIDE) as runtime:
        yield lambda prompt, params: runtime.generate([prompt], params)[0]


def test_32_requests_on_a_cache_for_8_get_their_own_tokens_and_give_every_block_back(open_runtime, alone):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [prompt(8 + number % 5, number) for number in range(32)]
    runtime = open_runtime(**WIDE, block_size=4, num_kv_blocks=8 * 9 + 1)  # 8 requests of 36 tokens
    outputs = runtime.generate(prompts, params)
    assert [tokens(output) for output in outputs] == [tokens(alone(prompt, params)) for prompt in prompts]
    stats = runtime.stats()
    assert stats["preemptions"] > 0
    assert stats["blocks"]["free"] + stats["blocks"]["cached"] == stats["blocks"]["total"] == 72
    assert stats["blocks"]["used"] == 0
    assert stats["requests"] == {"waiting": 0, "running": 0, "finished": 32}


def test_blocks_that_go_to_the_host_and_back_leave_each_request_its_own_tokens(open_runtime, alone):
    params = [
        SamplingParams(temperature=0.8 * (n % 2), seed=n, max_tokens=24, ignore_eos=True) for n in range(32)
    ]
    prompts = [prompt(8 + number % 5, number) for number in range(32)]
    right = [tokens(alone(*request)) for request in zip(prompts, params, strict=True)]
    used = {}
    for slots in (0, 5, 80):
        runtime = open_runtime(**WIDE, block_size=4, num_kv_blocks=8 * 9 + 1, swap_bytes=slots * 4 * 1024)
        assert [tokens(output) for output in runtime.generate(prompts, params)] == right
        stats = runtime.stats()
        assert stats["preemptions"] > 0
        used[slots] = swap = stats["swap"]
        assert (swap["total"], swap["used"]) == (slots, 0)
        assert swap["in_bytes"] == swap["in"] * 4 * 1024
    assert 0 == used[0]["in"] < used[5]["in"] < used[80]["in"] <= used[80]["out"]


limits = st.fixed_dictionaries(
    {
        "block_size": st.integers(1, 5),
        "num_kv_blocks": st.integers(5, 12),
        "max_num_seqs": st.integers(1, 4),
        "max_num_batched_tokens": st.integers(1, 20),
        "prefill_chunk": st.none() | st.integers(1, 6),
        "prefix_cache": st.booleans(),
        "swap_bytes": st.sampled_from([0, 6 * 1024, 1 << 20]),
    }
)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 14),
    temperature=st.sampled_from([0, 0.8, 1.5]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.7]),
    seed=st.integers(0, 3),
    logprobs=st.sampled_from([None, None, 2]),
    prompt_logprobs=st.sampled_from([None, None, 1]),
)
requests = st.tuples(st.integers(1, 12), st.integers(0, 3), params)


@given(
    data=st.data(),
    limits=limits,
    wanted=st.lists(requests, min_size=1, max_size=6),
    depth=st.integers(1, 3),
)
def test_random_traffic_changes_nobodys_tokens_and_leaves_nothing(
    tiny_folder, alone, is_idle, data, limits, wanted, depth
):
    """Requests come as streams, are read in any order, and some are closed before their end."""
    capacity = limits["block_size"] * (limits["num_kv_blocks"] - 1)
    limits["swap_bytes"] *= limits["prefix_cache"]
    wanted = [(prompt(min(length, capacity), seed), params) for length, seed, params in wanted]
    with (
        patch.dict(engine_builder.DEPTHS, cpu=depth),
        Runtime.from_pretrained(tiny_folder, **WIDE, **limits) as runtime,
    ):
        streams = {number: runtime.stream(*request) for number, request in enumerate(wanted)}
        received = {number: [] for number in streams}
        while streams:
            number = data.draw(st.sampled_from(sorted(streams)))
            if received[number] and data.draw(st.integers(0, 9)) == 0:
                streams.pop(number).close()
            elif (delta := next(streams[number], None)) is None:
                del streams[number]
            else:
                received[number].append(delta)
        is_idle(runtime)
    for number, (ids, own) in enumerate(wanted):
        check(received[number], alone(ids, own), room=capacity + 1 - len(ids))


def numbers(entries):
    """Ids and log-probabilities in a row."""
    return [number for entry in entries for id_, told in entry.items() for number in (id_, told.logprob)]


def check(deltas, whole, room):
    """The deltas are those of the whole answer, up to where they were closed or the cache was full."""
    got = [token for delta in deltas for token in delta.token_ids]
    assert got == tokens(whole)[: len(got)]
    right = whole.outputs[0].logprobs
    told = [entry for delta in deltas if delta.logprobs is not None for entry in delta.logprobs]
    assert numbers(told) == pytest.approx(numbers(() if right is None else right[: len(got)]), abs=1e-5)
    if deltas and deltas[0].token_ids and whole.prompt_logprobs is not None:
        of_prompt = deltas[0].prompt_logprobs[1:]
        assert numbers(of_prompt) == pytest.approx(numbers(whole.prompt_logprobs[1:]), abs=1e-5)
    reasons = [delta.finish_reason for delta in deltas]
    assert not any(reasons[:-1])
    if reasons[-1:] not in ([], [None]):
        is_cut = room < len(tokens(whole))
        assert len(got) == min(room, len(tokens(whole)))
        assert reasons[-1] == ("length" if is_cut else whole.outputs[0].finish_reason)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_seed_gives_the_same_tokens_alone_among_others_and_after_preemption(open_runtime, dtype):
    seeded = SamplingParams(seed=42, temperature=0.8, max_tokens=16, ignore_eos=True)
    unseeded = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    ids, others = prompt(6, 0), [prompt(5, 1), prompt(7, 2)]
    runtime = open_runtime(dtype=dtype)
    right = tokens(runtime.generate([ids], seeded)[0])
    assert len(set(right)) > 4
    first = runtime.generate([ids, *others], [seeded, unseeded, unseeded])[0]
    last = runtime.generate([*others, ids], [unseeded, unseeded, seeded])[2]
    small = open_runtime(dtype=dtype, block_size=4, num_kv_blocks=12)
    preempted = small.generate([*others, ids], [unseeded, unseeded, seeded])[2]
    assert small.stats()["preemptions"] > 0
    assert tokens(first) == tokens(last) == tokens(preempted) == right


def test_unseeded_requests_draw_apart_and_the_runtimes_seed_repeats_them(open_runtime):
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    drawn = [tokens(output) for output in open_runtime().generate([[5]] * 4, params)]
    again = [tokens(output) for output in open_runtime().generate([[5]] * 4, params)]
    other = [tokens(output) for output in open_runtime(seed=1).generate([[5]] * 4, params)]
    assert len({*map(tuple, drawn)}) == 4
    assert drawn == again != other


def test_calls_in_a_row_with_equal_prompts_give_each_call_its_own_results_in_order(open_runtime):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    lengths = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (2, 9, 5)]
    runtime = open_runtime()
    prompts = [[5, 6], [7], [5, 6]]
    first = runtime.generate(prompts, params)
    assert tokens(first[0]) == tokens(first[2]) != tokens(first[1])
    for _ in range(2):
        outputs = runtime.generate(prompts, lengths)
        assert [output.prompt_token_ids for output in outputs] == [tuple(ids) for ids in prompts]
        assert [len(tokens(output)) for output in outputs] == [2, 9, 5]
        assert tokens(outputs[2]) == tokens(first[2])[:5]
    ids = [output.request_id for output in first + outputs]
    assert len(set(ids)) == len(ids)


def test_one_prompt_may_be_given_bare_and_integers_may_be_of_numpy_or_torch(open_runtime):
    import numpy
    import torch

    runtime, params = open_runtime(), SamplingParams(temperature=0, max_tokens=3)
    spelt = [[5, 6], (5, 6), [numpy.int64(5), 6], [torch.tensor(5), 6], [[5, 6]], range(5, 7)]
    answers = {tuple(tokens(output)) for ids in spelt for output in runtime.generate(ids, params)}
    assert len(answers) == 1


def test_a_ceiling_above_the_context_is_clamped_and_says_length(open_runtime):
    runtime = open_runtime(max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=100_000, ignore_eos=True)
    output = runtime.generate([prompt(10, 0)], params)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (54, "length")


def test_times_are_in_order_and_the_count_of_cached_tokens_is_there(open_runtime):
    output = open_runtime().generate([[5]], SamplingParams(max_tokens=3))[0]
    assert output.times.queued <= output.times.first_token <= output.times.finished
    assert output.num_cached_tokens == 0
