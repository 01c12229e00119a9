"""What the scheduler owes each request in cases that have a name."""

import gc
import random

import numpy
import pytest

from lamina.common.errors import ConfigError, RequestError
from lamina.runtime.protocol.runner_output import RunnerOutput
from lamina.runtime.scheduler.config import BOUNDS, SchedulerConfig
from lamina.runtime.scheduler.request import RequestStatus


def test_a_prompt_larger_than_the_cache_is_refused_and_the_next_one_is_served(make_server):
    server = make_server(blocks=8)
    with pytest.raises(RequestError, match=r"40 tokens, but the whole KV cache holds 32"):
        server.add("large", 40)
    small = server.add("small", 5, max_tokens=3)
    server.drain()
    assert len(small.output_token_ids) == 3


def test_a_request_that_outgrows_the_whole_cache_ends_with_length(make_server):
    server = make_server(blocks=8)
    request = server.add("a", 30, max_tokens=50)
    server.drain()
    assert request.finish_reason == "length"
    assert request.output_token_ids == server.alone(request)[0]
    assert request.num_tokens == 33  # the last token needs no room, as nothing comes after it


def test_a_ceiling_above_the_context_is_clamped(make_server):
    server = make_server(blocks=40, context=64)
    request = server.add("a", 10, max_tokens=100_000)
    server.drain()
    assert (len(request.output_token_ids), request.finish_reason) == (54, "length")


def test_without_max_tokens_a_request_runs_to_the_end_of_the_context(make_server):
    server = make_server(blocks=40, context=64)
    request = server.add("a", 10)
    server.drain()
    assert (request.num_tokens, request.finish_reason) == (64, "length")


def test_a_preempted_request_resumes_in_chunks_with_its_next_token(make_server):
    server = make_server(blocks=5, chunk=4)
    old, young = (
        server.add("old", 5, 1, max_tokens=12),
        server.add("young", 5, 2, max_tokens=12),
    )
    plans = server.drain()
    preempted_at = next(i for i, plan in enumerate(plans) if "young" in plan.preempted_ids)
    parts = [part for plan in plans[preempted_at:] for part in server.parts(plan)]
    parts = [part for part in parts if part.request_id == "young"]
    assert [len(part.token_ids) for part in parts[:2]] == [4, 4]
    assert parts[0].num_computed == 0
    assert young.num_preemptions >= 1
    assert old.num_preemptions == 0
    for request in (old, young):
        assert request.output_token_ids == server.alone(request)[0]


def test_two_requests_in_a_cache_for_one_get_the_tokens_of_a_large_cache(make_server):
    server = make_server(blocks=10)
    requests = [server.add(name, 5, seed, max_tokens=24) for seed, name in enumerate("ab")]
    server.drain()
    assert server.scheduler.num_preemptions >= 1
    for request in requests:
        assert len(request.output_token_ids) == 24
        assert request.output_token_ids == server.alone(request)[0]


def test_the_youngest_keeps_its_blocks_while_nobody_older_needs_them(make_server):
    server = make_server(blocks=4)
    server.add("old", 4, max_tokens=5)  # fills its second block, the last one free, and ends
    young = server.add("young", 6, max_tokens=9)
    plans = server.drain()
    assert [plan.num_rows for plan in plans[:6]] == [2, 2, 2, 1, 1, 1]
    assert [plan.request_ids[0] for plan in plans[3:6]] == ["old", "old", "young"]
    assert young.num_preemptions == 0
    assert young.output_token_ids == server.alone(young)[0]


def test_nobody_is_admitted_while_the_running_have_no_block_to_grow_into(make_server):
    server = make_server(blocks=6)
    server.add("a", 8, max_tokens=9)
    server.step()
    server.add("b", 12, max_tokens=1)  # three blocks of the three that are free once a has its third
    plan = server.step()
    assert plan.request_ids == ("a",)
    server.drain()
    assert server.scheduler.num_preemptions == 0


@pytest.mark.parametrize("state", ["waiting", "mid-chunk", "running", "preempted"])
def test_an_abort_frees_every_block_in_every_state(make_server, state):
    server = make_server(blocks=6, seqs=2, chunk=4)
    server.add("old", 5, max_tokens=16)
    victim = server.add("victim", 6, max_tokens=16)
    done = {
        "waiting": lambda: True,
        "mid-chunk": lambda: 0 < server.scheduler.num_computed_tokens(victim) < 6,
        "running": lambda: victim.output_token_ids,
        "preempted": lambda: victim.status is RequestStatus.PREEMPTED,
    }[state]
    while not done():
        server.step()
    assert server.scheduler.abort("victim")
    assert not server.scheduler.abort("victim")
    server.scheduler.check()
    assert (victim.finish_reason, victim.status) == ("abort", RequestStatus.FINISHED)
    assert server.scheduler.abort("old")
    assert server.pool.num_used == 0
    assert not server.scheduler.has_work


def test_a_request_aborted_while_its_step_runs_keeps_its_blocks_until_the_step_is_over(make_server):
    server = make_server(blocks=6)
    request = server.add("a", 5)
    server.launch()
    assert server.scheduler.abort("a")
    assert not server.scheduler.abort("a")
    assert server.pool.num_used == 2
    with pytest.raises(RequestError, match="in use"):
        server.add("a", 5)
    assert server.land() == []
    assert server.pool.num_used == 0
    assert request.output_token_ids == []
    server.add("a", 5, max_tokens=1)
    server.drain()


def test_a_failed_step_can_be_tried_again(make_server):
    server = make_server(blocks=6)
    request = server.add("a", 5, max_tokens=4)
    server.step()
    failed = server.launch()
    server.fail()
    again = server.launch()
    assert server.parts(again) == server.parts(failed)
    server.land()
    server.drain()
    assert request.output_token_ids == server.alone(request)[0]


@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 16, 36, 37, 64])
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_any_chunking_of_a_prompt_gives_the_same_tokens(make_server, chunk, budget):
    server = make_server(blocks=20, chunk=chunk, budget=budget)
    request = server.add("a", 37, max_tokens=10)
    server.drain()
    assert request.output_token_ids == server.alone(request)[0]


def test_what_the_last_chunk_leaves_of_the_budget_goes_to_the_next_request(make_server):
    server = make_server(blocks=60, budget=16)
    server.add("first", 20)
    server.add("second", 100)
    server.step()
    plan = server.step()
    assert [(part.request_id, len(part.token_ids)) for part in server.parts(plan)] == [
        ("first", 4),
        ("second", 12),
    ]


def test_a_long_prompt_does_not_hold_up_those_that_are_running(make_server):
    server = make_server(blocks=60, budget=8)
    short = server.add("short", 3, max_tokens=30)
    server.add("long", 100)
    for _ in range(10):
        server.step()
    assert len(short.output_token_ids) == 10


def test_requests_start_in_the_order_they_came(make_server):
    server = make_server(blocks=30, seqs=2)
    requests = [server.add(f"r{i}", 3, i, max_tokens=2 + i % 3) for i in range(9)]
    server.drain()
    starts = [request.times.first_scheduled for request in requests]
    assert starts == sorted(starts)


def test_every_eos_id_stops_and_none_is_a_stop_reason(make_server):
    for token in (5, 6, 7):
        server = make_server(blocks=8, eos=(5, 6, 7), next_token=lambda prefix, banned, token=token: token)
        request = server.add("a", 3)
        server.drain()
        assert (request.output_token_ids, request.finish_reason, request.stop_reason) == (
            [token],
            "stop",
            None,
        )


def test_ignore_eos_goes_on_but_the_callers_own_stop_ids_still_stop(make_server):
    server = make_server(blocks=8, eos=(2, 7), next_token=lambda prefix, banned: 7 if len(prefix) < 8 else 9)
    request = server.add("a", 3, ignore_eos=True, stop_token_ids=[9])
    server.drain()
    assert request.output_token_ids == [7] * 5 + [9]
    assert (request.finish_reason, request.stop_reason) == ("stop", 9)


def test_until_min_tokens_the_ids_that_stop_are_banned_and_the_next_token_may_stop(make_server):
    server = make_server(blocks=8, eos=(7,), next_token=lambda prefix, banned: 3 if 7 in banned else 7)
    request = server.add("a", 3, min_tokens=5)
    server.drain()
    assert request.output_token_ids == [3] * 5 + [7]


def test_until_min_tokens_not_even_a_banned_id_stops(make_server):
    server = make_server(blocks=8, eos=(7,), next_token=lambda prefix, banned: 7)
    request = server.add("a", 3, min_tokens=5)
    server.drain()
    assert request.output_token_ids == [7] * 6


def test_a_stop_on_the_last_allowed_token_is_a_stop(make_server):
    server = make_server(blocks=8, eos=(7,), next_token=lambda prefix, banned: 7)
    request = server.add("a", 3, max_tokens=1)
    server.drain()
    assert request.finish_reason == "stop"


def test_times_are_in_order_and_survive_preemption(make_server):
    server = make_server(blocks=10)
    requests = [server.add(name, 5, max_tokens=24) for name in "ab"]
    server.step()
    first = [(request.times.first_scheduled, request.times.first_token) for request in requests]
    server.drain()
    assert server.scheduler.num_preemptions
    assert first == [(request.times.first_scheduled, request.times.first_token) for request in requests]
    for times in (request.times for request in requests):
        assert times.queued <= times.first_scheduled <= times.first_token <= times.finished


def test_an_id_in_use_is_refused_and_may_be_used_again_later(make_server):
    server = make_server(blocks=8)
    server.add("a", 3, max_tokens=1)
    with pytest.raises(RequestError, match="'a' is in use"):
        server.add("a", 3)
    server.drain()
    server.add("a", 3, max_tokens=1)
    server.drain()


def test_steps_end_in_the_order_in_which_they_were_launched_with_all_their_tokens(make_server):
    server = make_server(blocks=8)
    server.add("a", 3)
    first, second = server.launch(), server.launch()
    with pytest.raises(AssertionError, match="not the oldest"):
        server.scheduler.update(second, RunnerOutput(token_ids=numpy.zeros(1, numpy.int32)))
    with pytest.raises(AssertionError, match="2 tokens for 1"):
        server.scheduler.update(first, RunnerOutput(token_ids=numpy.zeros(2, numpy.int32)))
    server.land()
    with pytest.raises(AssertionError, match="not a step in flight"):
        server.scheduler.discard(first)


def test_a_random_workload_keeps_the_books_and_gives_everyone_their_tokens(make_server):
    server = make_server(blocks=24, seqs=6, budget=24, chunk=9, eos=(4,))
    random_ = random.Random(0)
    for i in range(500):
        server.add(f"r{i}", random_.randint(1, 30), i, max_tokens=random_.randint(1, 30))
        if i % 7 == 3:
            server.scheduler.abort(f"r{random_.randrange(i)}")
        if i % 3 == 0:
            server.step()
    server.drain()
    assert server.scheduler.num_finished == 500
    assert server.scheduler.num_preemptions > 0
    for request in server.requests.values():
        tokens = server.alone(request)[0]
        assert request.output_token_ids == tokens[: len(request.output_token_ids)]
        assert request.finish_reason == "abort" or len(tokens) == len(request.output_token_ids)


def test_nothing_of_a_finished_request_is_kept(make_server):
    server = make_server(blocks=32, seqs=8)

    def serve(count):
        for i in range(count):
            server.add(f"r{i}", 3, max_tokens=2)
            if i % 8 == 7:
                server.drain()
                server.requests.clear()
        gc.collect()
        return len(gc.get_objects())

    serve(200)
    before = serve(800)
    assert serve(3200) <= before + 50


def test_a_long_prompt_takes_the_whole_step_alone_and_little_of_it_beside_an_answer(make_server):
    server = make_server(blocks=60, budget=64, beside_decode=8)
    first = server.add("first", 60, max_tokens=30)
    assert server.step().num_tokens == 60
    server.add("second", 60, 1, max_tokens=4)
    beside = [plan.num_tokens for plan in server.drain() if plan.num_rows == 2]
    assert first.finish_reason == "length"
    assert beside[0] == 8, "the answer's own token and seven of the prompt"
    assert max(beside) == 8


@pytest.mark.parametrize("name", ["max_model_len", *BOUNDS])
def test_limits_below_the_least_are_refused_by_name(name):
    good = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 2, "prefill_chunk": 1}
    SchedulerConfig(**good)
    with pytest.raises(ConfigError, match=f"{name} is 0; wanted at least"):
        SchedulerConfig(**{**good, name: 0})


def test_whoever_comes_and_goes_leaves_the_others_in_their_rows(make_server):
    server = make_server(blocks=200, seqs=8)
    for number in range(8):
        server.add(str(number), 5, number, max_tokens=4 + 3 * number)
    before = server.step().request_ids
    for number in range(8, 40):
        server.add(str(number), 5, number % 8, max_tokens=4 + number)
        plan = server.step()
        others = sum(name != other for name, other in zip(before, plan.request_ids, strict=True))
        ended = len({*before} - {*plan.request_ids})
        sent = {*plan.new_blocks[0].tolist()} - {
            row for row, count in enumerate(plan.num_computed_tokens % 4) if not count
        }
        assert others <= 2 * ended, "for each that ends the last one moves, and one comes"
        assert len(sent) <= 2 * ended, "tables of the others are not sent again"
        before = plan.request_ids
    server.drain()
    for request in server.requests.values():
        assert request.output_token_ids == server.alone(request)[0]


def test_where_the_budget_is_short_it_goes_by_rank_and_not_by_row(make_server):
    server = make_server(blocks=200, seqs=4, budget=8, beside_decode=3, chunk=2)
    lengths = {"first": (2, 3), "answer": (2, 60), "second": (40, 3), "third": (40, 3)}
    first, _, second, third = (
        server.add(name, length, max_tokens=more) for name, (length, more) in lengths.items()
    )
    while not first.finish_reason:
        server.step()
    assert third.row < second.row, "the last one took the place of the first"
    while (left := 40 - server.scheduler.num_computed_tokens(second)) > 0:
        counts = {part.request_id: len(part.token_ids) for part in server.parts(server.step())}
        assert (counts["answer"], counts["second"], counts.get("third", 0)) == (
            1,
            min(left, 2),
            2 - min(left, 2),
        )
    server.drain()
    for request in server.requests.values():
        assert request.output_token_ids == server.alone(request)[0]


def test_what_a_request_fills_is_entered_before_anybody_looks_for_it_or_the_step_is_over(make_server):
    server = make_server(blocks=40, prefix_cache=True, depth=2)
    common = (1, 2, 3, 4) * 4
    server.add("first", common, max_tokens=4)
    server.launch()
    assert not [*server.kv_cache.prefix.block_ids()], "the step is launched before its blocks are hashed"
    second = server.add("second", (*common, 1), max_tokens=4)
    server.launch()
    assert second.num_cached_tokens == 16
    server.fail(0)
    assert not [*server.kv_cache.prefix.block_ids()], "nobody has written what the failed step had filled"
    server.drain()
    for request in server.requests.values():
        assert request.output_token_ids == server.alone(request)[0]


def test_in_one_step_only_whoever_begins_as_another_waits_for_its_blocks_to_be_hashed(make_server):
    server = make_server(blocks=60, seqs=8, prefix_cache=True)
    common = (1, 2, 3, 4) * 4
    first, other = server.add("first", (*common, 1)), server.add("other", (5, 6, 7, 8) * 4)
    salted = server.add("salted", (*common, 1), options={"cache_salt": "own"})
    server.launch()
    assert not [*server.kv_cache.prefix.block_ids()]
    server.land()
    assert len([*server.kv_cache.prefix.block_ids()]) == 3 * 4
    later = server.add("later", (9, 9, 9, 9) * 2), server.add("beside", (8, 8, 8, 8, 3))
    again = server.add("again", (9, 9, 9, 9, 9, 9, 9, 9, 2)), server.add("hit", (*common, 2))
    server.launch()
    cached = [request.num_cached_tokens for request in (first, other, salted, *later, *again)]
    assert cached == [0, 0, 0, 0, 0, 8, 16]
    server.drain()
    for request in server.requests.values():
        assert request.output_token_ids == server.alone(request)[0]
