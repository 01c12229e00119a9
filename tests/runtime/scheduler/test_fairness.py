"""Who goes first, who gives way and how often, and who runs out of time."""

import gc
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import RequestError, SamplingParams
from lamina.runtime.scheduler.request_queue import PRIORITY_SECONDS


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def starts(plans):
    """Names in the order in which requests were first computed."""
    return list(dict.fromkeys(name for plan in plans for name in plan.request_ids))


def test_a_lower_priority_value_goes_first_and_equal_ones_in_order_of_arrival(make_server):
    server = make_server(blocks=40, seqs=1)
    for name, priority in (("a", 0), ("b", 1), ("c", -1), ("d", 0), ("e", -1)):
        server.add(name, 4, max_tokens=1, options={"priority": priority})
    assert starts(server.drain()) == ["c", "e", "a", "d", "b"]


def test_nobody_waits_for_ever_behind_higher_priorities(make_server):
    clock = Clock()
    server = make_server(blocks=40, seqs=1, clock=clock)
    server.add("patient", 4, max_tokens=1, options={"priority": 1})
    for number in range(3):
        clock.now += PRIORITY_SECONDS * 0.4
        server.add(f"urgent {number}", 4, max_tokens=1)
    assert starts(server.drain()) == ["urgent 0", "urgent 1", "patient", "urgent 2"]


def test_one_of_higher_priority_ranks_before_those_that_run(make_server):
    server = make_server(blocks=7, seqs=3)
    low = [server.add(name, 4, seed, max_tokens=12) for seed, name in enumerate("ab")]
    server.step()
    high = server.add("high", 4, 7, max_tokens=8, options={"priority": -1})
    assert {*server.step().request_ids} == {"a", "b", "high"}
    server.drain()
    assert (high.num_preemptions, low[0].num_preemptions) == (0, 0)
    assert low[1].num_preemptions > 0
    for request in (high, *low):
        assert request.output_token_ids == server.alone(request)[0]


@given(
    blocks=st.integers(2, 40),
    block_size=st.integers(1, 4),
    depth=st.integers(1, 3),
    prefix_cache=st.booleans(),
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 60)), min_size=2, max_size=8),
)
def test_room_doubles_so_that_nobody_gives_way_more_often_than_that(
    make_server, blocks, block_size, depth, prefix_cache, lengths
):
    server = make_server(blocks=blocks, block_size=block_size, seqs=8, depth=depth, prefix_cache=prefix_cache)
    for number, (length, more) in enumerate(lengths):
        length = min(length, server.kv_cache.capacity_tokens)
        server.add(str(number), length, number % 3, max_tokens=more)
    server.drain()
    most = max(request.num_preemptions for request in server.requests.values())
    assert most <= blocks.bit_length() + 1


@pytest.mark.parametrize("state", ["waiting", "running", "ended"])
def test_time_ends_a_request_with_what_it_has(make_server, state):
    clock = Clock()
    server = make_server(blocks=20, seqs=1, clock=clock)
    if state == "waiting":
        server.add("before", 4, max_tokens=4)
    request = server.add("a", 4, max_tokens=4, options={"timeout": 10.0})
    server.step()
    server.step()
    if state == "ended":
        server.drain()
    clock.now = 9.0
    assert server.scheduler.expire() == []
    clock.now = 10.0
    assert server.scheduler.expire() == ([] if state == "ended" else [request])
    assert server.scheduler.expire() == []
    reason = ("length", None) if state == "ended" else ("abort", "deadline")
    assert (request.finish_reason, request.stop_reason) == reason
    assert len(request.output_token_ids) == {"waiting": 0, "running": 2, "ended": 4}[state]
    server.scheduler.check()
    server.drain()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_100_000_short_requests_with_aborts_leave_every_block_free_and_memory_flat(make_server, prefix_cache):
    server = make_server(blocks=8, seqs=8, depth=2, prefix_cache=prefix_cache)
    source, sizes = random.Random(0), []
    for number in range(100_000):
        options = {"priority": source.randint(-1, 1), "timeout": source.choice([None, 1e6])}
        server.add(
            str(number), source.randint(1, 12), number % 50, max_tokens=source.randint(1, 8), options=options
        )
        if source.random() < 0.1:
            server.scheduler.abort(str(source.randint(max(0, number - 8), number)))
        server.step()
        server.scheduler.expire()
        if server.scheduler.num_waiting > 20:
            server.drain()
            server.requests.clear()
        if number % 20_000 == 19_999:
            server.drain()
            server.requests.clear()
            gc.collect()
            sizes.append(len(gc.get_objects()))
    assert server.scheduler.num_preemptions > 0
    assert server.pool.num_used == 0
    assert max(sizes[1:]) <= sizes[0] + 200


def test_requests_with_a_deadline_are_not_kept_until_it_passes(make_server):
    server = make_server(blocks=20)
    for number in range(300):
        server.add(str(number), 4, max_tokens=1, options={"timeout": 1e6})
        server.drain()
        server.scheduler.expire()
    assert len(server.scheduler._queue._deadlines) < 40


def test_a_runtime_ends_a_request_whose_time_is_up_and_says_so(open_runtime):
    runtime = open_runtime()
    deltas = [*runtime.stream([5, 6], SamplingParams(ignore_eos=True), timeout=1e-9)]
    assert [delta.finish_reason for delta in deltas] == ["abort"]
    (output,) = runtime.generate([5, 6], SamplingParams(ignore_eos=True), timeout=1e-9)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("abort", "deadline")
    assert output.seconds_to_first_token is None
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    (output,) = runtime.generate([5, 6], params, timeout=3600.0, priority=3)
    assert output.outputs[0].finish_reason == "length"
    assert output.seconds_to_first_token > 0
    assert output.seconds_between_tokens > 0
    latency = runtime.stats()["latency"]
    assert latency["first_token"]["p50"] > 0
    assert latency["between_tokens"]["p95"] > 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"priority": "high"}, "priority is 'high'; wanted an integer"),
        ({"priority": True}, "priority is True"),
        ({"timeout": 0}, "timeout is 0; wanted a number, of seconds, above 0"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"cache_salt": 3}, "cache_salt is 3; wanted a string"),
    ],
)
def test_bad_options_are_refused_by_what_is_wrong_with_them(open_runtime, options, message):
    with pytest.raises(RequestError, match=message):
        open_runtime().generate([5], **options)


def test_an_unknown_option_is_a_type_error_that_names_it(open_runtime):
    with pytest.raises(TypeError, match="urgent"):
        open_runtime().generate([5], urgent=True)
