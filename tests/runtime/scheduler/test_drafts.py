"""Rows that sample several tokens: as many count as hold, wherever a stop, a length or an abort cuts them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.runtime.protocol.runner_output import RunnerOutput
from lamina.runtime.protocol.scheduler_output import NO_DRAFTS

from ..paged_model import VOCAB


def all_right(right, lots):
    return right


def all_wrong(right, lots):
    return [(token + 1) % VOCAB for token in right]


def alternating(right, lots):
    return [(token + place % 2) % VOCAB for place, token in enumerate(right)]


def by_lot(right, lots):
    """Some are wrong, and of some rows there are fewer or none."""
    drafts = [(token + (lots.random() < 0.3)) % VOCAB for token in right]
    return drafts[: lots.randint(0, len(drafts))]


SCRIPTS = [all_right, all_wrong, alternating, by_lot]
REQUESTS = st.fixed_dictionaries(
    {
        "length": st.integers(1, 12),
        "seed": st.integers(0, 3),
        "max_tokens": st.integers(1, 24),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.sampled_from([(), (3,), (0, 7)]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.0]),
        "logprobs": st.sampled_from([None, 0]),
    }
)


@settings(deadline=None)
@given(
    arrivals=st.lists(REQUESTS, min_size=1, max_size=5),
    aborted=st.none() | st.integers(0, 4),
    limits=st.fixed_dictionaries(
        {
            "drafts": st.integers(1, 5),
            "script": st.sampled_from(SCRIPTS),
            "depth": st.integers(1, 3),
            "blocks": st.integers(8, 24),
            "block_size": st.integers(1, 4),
            "chunk": st.none() | st.integers(1, 5),
            "eos": st.sampled_from([(), (5,)]),
            "prefix_cache": st.booleans(),
            "window": st.none() | st.integers(1, 10),
            "forced": st.sampled_from([0, 3, 20]),
        }
    ),
)
def test_rows_that_yield_several_tokens_get_those_that_they_get_one_by_one(
    make_server, arrivals, aborted, limits
):
    server = make_server(seqs=8, context=40, **limits)
    longest = min(server.kv_cache.capacity_tokens, 39)
    for number, arrival in enumerate(arrivals):
        own = arrival | {"min_tokens": min(arrival["min_tokens"], arrival["max_tokens"])}
        server.add(f"r{number}", min(own.pop("length"), longest), **own)
    for _ in range(3):
        server.step()
    if aborted is not None:
        server.scheduler.abort(f"r{aborted}")
    server.drain()
    for request in server.requests.values():
        tokens, reason = server.alone(request)
        count = len(request.output_token_ids)
        assert request.output_token_ids == tokens[:count]
        assert request.finish_reason == "abort" or (count, request.finish_reason) == (len(tokens), reason)
        reports = [report.token_ids[0] for report in request.logprobs]
        assert reports == ([] if request.params.logprobs is None else request.output_token_ids)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "script, most", [(all_right, 13), (alternating, 22), (all_wrong, 43)], ids=["right", "half", "wrong"]
)
def test_drafts_that_hold_take_steps_away_and_others_add_none(make_server, depth, script, most):
    server = make_server(blocks=30, block_size=16, drafts=3, script=script, depth=depth)
    requests = [server.add(name, 5, seed, max_tokens=40) for seed, name in enumerate("ab")]
    plans = server.drain()
    assert len(plans) <= most, "a step for the prompts, and those in flight when the last token was read"
    assert all(request.output_token_ids == server.alone(request)[0] for request in requests)


def test_the_next_step_does_not_wait_until_drafts_are_judged(make_server):
    server = make_server(blocks=40, drafts=2, depth=3)
    server.add("a", 3, 2, max_tokens=30)
    plans = [server.launch() for _ in range(3)]
    assert [plan.num_sampled_tokens.tolist() for plan in plans] == [[1], [3], [3]]
    assert [plan.sources.tolist() for plan in plans] == [[-1], [0], [0]]
    assert [plan.drafts.sources.tolist() for plan in plans] == [[NO_DRAFTS], [0], [0]]
    assert plans[2].num_computed_tokens.tolist() == [4], "the least: no draft of the step before is certain"
    server.drain()


def test_the_last_tokens_before_the_limit_have_no_more_drafts_than_can_count(make_server):
    server = make_server(blocks=40, context=14, drafts=4)
    request = server.add("a", 5, 2)
    plans = server.drain()
    assert [plan.num_tokens for plan in plans] == [5, 5, 3]
    assert request.finish_reason == "length"
    assert request.output_token_ids == server.alone(request)[0]


def test_rows_without_drafts_get_fillers_so_that_all_have_equally_many(make_server):
    server = make_server(blocks=40, drafts=3)
    server.add("a", 3, 1, max_tokens=20)
    server.add("b", 3, 2, max_tokens=20, min_tokens=20, stop_token_ids=(3,))
    server.step()
    plan = server.step()
    assert plan.query_len == 4
    assert plan.drafts.sources.tolist() == [0, NO_DRAFTS]
    server.drain()
    assert all(request.output_token_ids == server.alone(request)[0] for request in server.requests.values())


@pytest.mark.parametrize("counts", [[0], [3], [1, 1]])
def test_fewer_tokens_than_one_or_more_than_were_sampled_are_refused(make_server, counts):
    server = make_server(blocks=8)
    server.add("a", 3)
    plan = server.launch()
    tokens = np.ones(sum(counts), np.int32)
    output = RunnerOutput(token_ids=tokens, num_sampled=np.array(counts, np.int64))
    with pytest.raises(AssertionError, match="rows yielded"):
        server.scheduler.update(plan, output)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", [1, 5])
def test_tables_that_grow_by_many_blocks_at_once_have_all_of_them(make_server, drafts, depth):
    """As where a grammar forces many tokens: beyond the last block, and nowhere else, is the null block."""
    server = make_server(
        blocks=80, block_size=1, seqs=2, context=80, drafts=drafts, forced=30, script=by_lot, depth=depth
    )
    requests = [server.add(f"r{number}", 3, seed=number, max_tokens=60) for number in range(2)]
    server.drain()
    assert server.scheduler.num_forced_tokens > 30
    for request in requests:
        assert request.output_token_ids == server.alone(request)[0]
