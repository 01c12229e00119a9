"""The scheduler, its tables and its arena, driven by a model whose next token hashes all tokens before it.

The model sees only the arena: it stores (position, token) in the slot it is given and reads the whole prefix
back through the block table, so that a wrong id, position, slot, table or length shows as a wrong token.
"""

import gc
import pickle
import random
import zlib

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lamina.common.errors import ConfigError, RequestError
from lamina.runtime.block_pool import BlockPool
from lamina.runtime.input_batch import InputBatch
from lamina.runtime.kv_cache import KVCacheManager
from lamina.runtime.request import (
    Request,
    RequestStatus,
    SamplingParams,
    check_prompt,
    stopping_token_ids,
    total_tokens,
)
from lamina.runtime.scheduler import Scheduler, SchedulerConfig

VOCAB = 11


def hashed(prefix, banned=()):
    """A token that depends on every token before it, and on their order."""
    allowed = [token for token in range(VOCAB) if token not in banned]
    return allowed[zlib.crc32(bytes(prefix)) % len(allowed)]


class PagedModel:
    """The part of a model that paging can get wrong."""

    def __init__(self, block_size, next_token):
        self.block_size = block_size
        self.next_token = next_token
        self.slots = {}

    def run(self, view):
        self._store(view)
        prefixes = {row: self._prefix(view, row) for row in range(view.num_seqs)}
        ends = {end - 1: row for row, end in enumerate(view.query_start_loc.tolist()[1 : view.num_seqs + 1])}
        sampled = [prefixes[ends[row]] for row in view.logits_rows.tolist()]
        assert view.sample_positions.tolist() == [len(prefix) for prefix in sampled]
        banned = dict(view.banned)
        return [self.next_token(prefix, banned.get(row, ())) for row, prefix in enumerate(sampled)]

    def _store(self, view):
        tokens = [
            *zip(view.token_ids.tolist(), view.positions.tolist(), view.slot_mapping.tolist(), strict=True)
        ]
        for token, position, slot in tokens[: view.num_tokens]:
            assert slot >= self.block_size, "a real token goes to a real block, and never to the null block"
            self.slots[slot] = (position, token)
        assert all(token == (0, 0, -1) for token in tokens[view.num_tokens :])
        assert view.seq_lens[view.num_seqs :].tolist() == [0] * (len(view.seq_lens) - view.num_seqs)

    def _prefix(self, view, row):
        size, table = self.block_size, view.block_tables[row].tolist()
        stored = [self.slots[table[p // size] * size + p % size] for p in range(int(view.seq_lens[row]))]
        assert [position for position, _ in stored] == list(range(len(stored))), (
            "these slots hold other positions"
        )
        return tuple(token for _, token in stored)


class Server:
    """Everything an engine has but the engine."""

    def __init__(
        self, *, blocks, block_size=4, seqs=4, budget=64, context=128, chunk=None, eos=(), next_token=hashed
    ):
        self.pool = BlockPool(blocks + 1)  # one is the null block
        self.kv_cache = KVCacheManager(self.pool, block_size)
        self.config = SchedulerConfig(
            max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=context, prefill_chunk=chunk
        )
        self.scheduler = Scheduler(self.config, self.kv_cache)
        self.arena = InputBatch(
            max_num_seqs=seqs,
            max_num_tokens=budget,
            max_blocks_per_seq=blocks,
            block_size=block_size,
            vocab_size=VOCAB,
            device=torch.device("cpu"),
        )
        self.eos = eos
        self.model = PagedModel(block_size, next_token)
        self.requests = {}

    def add(self, name, prompt, **params):
        prompt = check_prompt(
            prompt,
            vocab_size=VOCAB,
            max_model_len=self.config.max_model_len,
            capacity_tokens=self.kv_cache.capacity_tokens,
        )
        params = SamplingParams(**params).resolve(None, seed=0)
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            params=params,
            stop_token_ids=stopping_token_ids(params, self.eos),
            max_total_tokens=total_tokens(len(prompt), params, self.config.max_model_len),
        )
        self.scheduler.add(request)
        self.requests[name] = request
        return request

    def begin(self):
        plan = self.scheduler.schedule()
        self.scheduler.check()
        if plan is None:
            return None, []
        view = self.arena.write(plan, self.config.max_num_batched_tokens, self.config.max_num_seqs)
        return plan, self.model.run(view)

    def step(self):
        plan, sampled = self.begin()
        if plan is not None:
            self.scheduler.update(plan, sampled)
            self.scheduler.check()
        return plan

    def drain(self, limit=5000):
        plans = []
        while self.scheduler.has_work:
            plans.append(self.step())
            assert len(plans) < limit, "nothing ends"
        assert self.pool.num_used == 0
        return plans

    def alone(self, request):
        """The tokens this request gets where nobody else exists and nothing is ever short but the context."""
        capacity = self.kv_cache.capacity_tokens
        limit = min(
            total_tokens(len(request.prompt_token_ids), request.params, self.config.max_model_len),
            capacity + 1,
        )
        output, stops, least = [], request.stop_token_ids, request.params.min_tokens
        while True:
            prefix = (*request.prompt_token_ids, *output)
            output.append(self.model.next_token(prefix, stops if len(output) < least else ()))
            if len(output) > least and output[-1] in stops:
                return output, "stop"
            if len(prefix) + 1 >= limit:
                return output, "length"


def prompt(length, seed=0):
    return tuple(random.Random(seed).choices(range(VOCAB), k=length))


class SchedulerMachine(RuleBasedStateMachine):
    """Any sequence of adds, steps, failed steps, aborts and stops, under any limits."""

    @initialize(
        blocks=st.integers(1, 8),
        block_size=st.integers(1, 4),
        seqs=st.integers(1, 4),
        budget=st.integers(1, 12),
        context=st.integers(2, 30),
        chunk=st.none() | st.integers(1, 5),
        eos=st.sets(st.integers(0, VOCAB - 1), max_size=1),
    )
    def start(self, eos, **limits):
        self.server = Server(eos=tuple(eos), **limits)
        self.scheduler = self.server.scheduler
        self.ended_early = set()

    @rule(
        length=st.integers(1, 16),
        seed=st.integers(0, 5),
        max_tokens=st.none() | st.integers(1, 20),
        min_tokens=st.integers(0, 4),
        stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=2),
        ignore_eos=st.booleans(),
    )
    def add(self, length, seed, max_tokens, min_tokens, stop_token_ids, ignore_eos):
        limit = min(self.server.config.max_model_len - 1, self.server.kv_cache.capacity_tokens)
        arguments = {"max_tokens": max_tokens, "stop_token_ids": stop_token_ids, "ignore_eos": ignore_eos}
        arguments["min_tokens"] = min(min_tokens, max_tokens or min_tokens)
        if length > limit:
            with pytest.raises(RequestError):
                self.server.add("too long", prompt(length, seed), **arguments)
        else:
            self.server.add(f"r{len(self.server.requests)}", prompt(length, seed), **arguments)

    @rule()
    def step(self):
        self.advance(lambda plan, sampled: self.scheduler.update(plan, sampled))

    @rule()
    def fail_a_step(self):
        if (plan := self.server.begin()[0]) is not None:
            self.scheduler.discard(plan)

    @rule(data=st.data())
    def abort_while_a_step_runs(self, data):
        plan, sampled = self.server.begin()
        victim = self.end(data, lambda name: self.scheduler.abort(name))
        self.scheduler.check()
        if plan is not None:
            received = self.scheduler.update(plan, sampled)
            assert victim not in {request.request_id for request in received}

    @rule(data=st.data())
    def abort(self, data):
        assert not self.scheduler.abort("unknown")
        victim = self.end(data, lambda name: self.scheduler.abort(name))
        assert victim is None or not self.scheduler.abort(victim), "twice is a no-op"

    @rule(data=st.data())
    def stop(self, data):
        """What an engine does when it finds a stop string."""
        self.end(data, lambda name: self.scheduler.finish(name, "stop", "text"))

    def end(self, data, how):
        live = [r.request_id for r in self.server.requests.values() if r.status is not RequestStatus.FINISHED]
        if not live:
            return None
        name = data.draw(st.sampled_from(live))
        how(name)
        self.ended_early.add(name)
        return name

    def advance(self, update):
        live = [r for r in self.server.requests.values() if r.status is not RequestStatus.FINISHED]
        progress = {r.request_id: (len(r.output_token_ids), r.num_computed_tokens) for r in live}
        plan, sampled = self.server.begin()
        assert (plan is None) == (not live)
        if plan is None:
            return
        self.check_plan(plan)
        received = update(plan, sampled)
        assert len(received) == len(sampled)
        oldest = live[0]
        now = (len(oldest.output_token_ids), oldest.num_computed_tokens)
        assert now > progress[oldest.request_id], "the oldest request did not advance"

    def check_plan(self, plan):
        config, planned = self.server.config, {r.request_id for r in plan.requests}
        assert (
            0
            < plan.num_tokens
            == sum(len(r.token_ids) for r in plan.requests)
            <= config.max_num_batched_tokens
        )
        assert len(planned) == len(plan.requests) <= config.max_num_seqs
        assert all(len(r.token_ids) <= (config.prefill_chunk or plan.num_tokens) for r in plan.requests)
        running = [r for r in self.server.requests.values() if r.status is RequestStatus.RUNNING]
        idle = [r for r in running if r.request_id not in planned]
        assert idle in ([], running[-1:]), "only the youngest may sit out, for want of a block"
        assert not planned & set(plan.preempted_ids)

    @invariant()
    def everything_adds_up(self):
        if not hasattr(self, "server"):
            return
        self.scheduler.check()
        pool = self.server.pool
        assert pool.num_free + pool.num_used == pool.num_usable
        statuses = [r.status for r in self.server.requests.values()]
        assert self.scheduler.num_finished == statuses.count(RequestStatus.FINISHED)
        assert self.scheduler.num_running == statuses.count(RequestStatus.RUNNING)
        assert self.scheduler.num_preemptions == sum(r.num_preemptions for r in self.server.requests.values())

    def teardown(self):
        if not hasattr(self, "server"):
            return
        self.server.drain()
        for request in self.server.requests.values():
            tokens, reason = self.server.alone(request)
            count = len(request.output_token_ids)
            assert request.output_token_ids == tokens[:count], "not the tokens it gets alone"
            if request.request_id not in self.ended_early:
                assert (count, request.finish_reason) == (len(tokens), reason)
        assert not self.scheduler.num_running
        assert not self.scheduler.num_waiting


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnySequenceOfEventsGivesEachRequestItsOwnTokens = SchedulerMachine.TestCase


def test_a_prompt_larger_than_the_cache_is_refused_and_the_next_one_is_served():
    server = Server(blocks=8)
    with pytest.raises(RequestError, match=r"40 tokens, but the whole KV cache holds 32"):
        server.add("large", prompt(40))
    small = server.add("small", prompt(5), max_tokens=3)
    server.drain()
    assert len(small.output_token_ids) == 3


def test_a_request_that_outgrows_the_whole_cache_ends_with_length():
    server = Server(blocks=8)
    request = server.add("a", prompt(30), max_tokens=50)
    server.drain()
    assert request.finish_reason == "length"
    assert request.output_token_ids == server.alone(request)[0]
    assert request.num_tokens == 33  # the last token needs no room, as nothing comes after it


def test_a_ceiling_above_the_context_is_clamped():
    server = Server(blocks=40, context=64)
    request = server.add("a", prompt(10), max_tokens=100_000)
    server.drain()
    assert (len(request.output_token_ids), request.finish_reason) == (54, "length")


def test_without_max_tokens_a_request_runs_to_the_end_of_the_context():
    server = Server(blocks=40, context=64)
    request = server.add("a", prompt(10))
    server.drain()
    assert (request.num_tokens, request.finish_reason) == (64, "length")


def test_a_preempted_request_resumes_in_chunks_with_its_next_token():
    server = Server(blocks=5, chunk=4)
    old, young = (
        server.add("old", prompt(5, 1), max_tokens=12),
        server.add("young", prompt(5, 2), max_tokens=12),
    )
    plans = server.drain()
    preempted_at = next(i for i, plan in enumerate(plans) if "young" in plan.preempted_ids)
    parts = [part for plan in plans[preempted_at:] for part in plan.requests if part.request_id == "young"]
    assert [len(part.token_ids) for part in parts[:2]] == [4, 4]
    assert parts[0].num_computed_tokens == 0
    assert young.num_preemptions >= 1
    assert old.num_preemptions == 0
    for request in (old, young):
        assert request.output_token_ids == server.alone(request)[0]


def test_two_requests_in_a_cache_for_one_get_the_tokens_of_a_large_cache():
    server = Server(blocks=10)
    requests = [server.add(name, prompt(5, seed), max_tokens=24) for seed, name in enumerate("ab")]
    server.drain()
    assert server.scheduler.num_preemptions >= 1
    for request in requests:
        assert len(request.output_token_ids) == 24
        assert request.output_token_ids == server.alone(request)[0]


def test_the_youngest_keeps_its_blocks_while_nobody_older_needs_them():
    server = Server(blocks=4)
    server.add("old", prompt(4), max_tokens=5)  # fills its second block, the last one free, and ends
    young = server.add("young", prompt(6), max_tokens=9)
    plans = server.drain()
    assert [len(plan.requests) for plan in plans[:6]] == [2, 2, 2, 1, 1, 1]
    assert [plan.requests[0].request_id for plan in plans[3:6]] == ["old", "old", "young"]
    assert young.num_preemptions == 0
    assert young.output_token_ids == server.alone(young)[0]


def test_nobody_is_admitted_while_the_running_have_no_block_to_grow_into():
    server = Server(blocks=6)
    server.add("a", prompt(8), max_tokens=9)
    server.step()
    server.add("b", prompt(12), max_tokens=1)  # three blocks of the three that are free once a has its third
    plan = server.step()
    assert [part.request_id for part in plan.requests] == ["a"]
    server.drain()
    assert server.scheduler.num_preemptions == 0


@pytest.mark.parametrize("state", ["waiting", "mid-chunk", "running", "preempted"])
def test_an_abort_frees_every_block_in_every_state(state):
    server = Server(blocks=6, seqs=2, chunk=4)
    server.add("old", prompt(5), max_tokens=16)
    victim = server.add("victim", prompt(6), max_tokens=16)
    done = {
        "waiting": lambda: True,
        "mid-chunk": lambda: 0 < victim.num_computed_tokens < 6,
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


def test_a_request_aborted_while_its_step_runs_keeps_its_blocks_until_the_step_is_over():
    server = Server(blocks=6)
    request = server.add("a", prompt(5))
    plan, sampled = server.begin()
    assert server.scheduler.abort("a")
    assert not server.scheduler.abort("a")
    assert server.pool.num_used == 2
    with pytest.raises(RequestError, match="in use"):
        server.add("a", prompt(5))
    assert server.scheduler.update(plan, sampled) == []
    assert server.pool.num_used == 0
    assert request.output_token_ids == []
    server.add("a", prompt(5), max_tokens=1)
    server.drain()


def test_a_failed_step_can_be_tried_again():
    server = Server(blocks=6)
    request = server.add("a", prompt(5), max_tokens=4)
    server.step()
    failed, _ = server.begin()
    server.scheduler.discard(failed)
    again, sampled = server.begin()
    assert again.requests == failed.requests
    server.scheduler.update(again, sampled)
    server.drain()
    assert request.output_token_ids == server.alone(request)[0]


@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 16, 36, 37, 64])
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_any_chunking_of_a_prompt_gives_the_same_tokens(chunk, budget):
    server = Server(blocks=20, chunk=chunk, budget=budget)
    request = server.add("a", prompt(37), max_tokens=10)
    server.drain()
    assert request.output_token_ids == server.alone(request)[0]


def test_what_the_last_chunk_leaves_of_the_budget_goes_to_the_next_request():
    server = Server(blocks=60, budget=16)
    server.add("first", prompt(20))
    server.add("second", prompt(100))
    server.step()
    plan = server.step()
    assert [(part.request_id, len(part.token_ids)) for part in plan.requests] == [
        ("first", 4),
        ("second", 12),
    ]


def test_a_long_prompt_does_not_hold_up_those_that_are_running():
    server = Server(blocks=60, budget=8)
    short = server.add("short", prompt(3), max_tokens=30)
    server.add("long", prompt(100))
    for _ in range(10):
        server.step()
    assert len(short.output_token_ids) == 10


def test_requests_start_in_the_order_they_came():
    server = Server(blocks=30, seqs=2)
    requests = [server.add(f"r{i}", prompt(3, i), max_tokens=2 + i % 3) for i in range(9)]
    server.drain()
    starts = [request.times.first_scheduled for request in requests]
    assert starts == sorted(starts)


def test_every_eos_id_stops_and_none_is_a_stop_reason():
    for token in (5, 6, 7):
        server = Server(blocks=8, eos=(5, 6, 7), next_token=lambda prefix, banned, token=token: token)
        request = server.add("a", prompt(3))
        server.drain()
        assert (request.output_token_ids, request.finish_reason, request.stop_reason) == (
            [token],
            "stop",
            None,
        )


def test_ignore_eos_goes_on_but_the_callers_own_stop_ids_still_stop():
    server = Server(blocks=8, eos=(2, 7), next_token=lambda prefix, banned: 7 if len(prefix) < 8 else 9)
    request = server.add("a", prompt(3), ignore_eos=True, stop_token_ids=[9])
    server.drain()
    assert request.output_token_ids == [7] * 5 + [9]
    assert (request.finish_reason, request.stop_reason) == ("stop", 9)


def test_until_min_tokens_the_ids_that_stop_are_banned_and_the_next_token_may_stop():
    server = Server(blocks=8, eos=(7,), next_token=lambda prefix, banned: 3 if 7 in banned else 7)
    request = server.add("a", prompt(3), min_tokens=5)
    server.drain()
    assert request.output_token_ids == [3] * 5 + [7]


def test_until_min_tokens_not_even_a_banned_id_stops():
    server = Server(blocks=8, eos=(7,), next_token=lambda prefix, banned: 7)
    request = server.add("a", prompt(3), min_tokens=5)
    server.drain()
    assert request.output_token_ids == [7] * 6


def test_a_stop_on_the_last_allowed_token_is_a_stop():
    server = Server(blocks=8, eos=(7,), next_token=lambda prefix, banned: 7)
    request = server.add("a", prompt(3), max_tokens=1)
    server.drain()
    assert request.finish_reason == "stop"


def test_an_ended_request_may_be_given_a_better_reason_and_a_live_one_not():
    server = Server(blocks=8)
    request = server.add("a", prompt(3), max_tokens=1)
    with pytest.raises(AssertionError, match="a is live"):
        server.scheduler.restate(request, "stop", "text")
    server.drain()
    assert request.finish_reason == "length"
    server.scheduler.restate(request, "stop", "text")
    assert (request.finish_reason, request.stop_reason) == ("stop", "text")
    assert server.scheduler.num_finished == 1


def test_times_are_in_order_and_survive_preemption():
    server = Server(blocks=10)
    requests = [server.add(name, prompt(5), max_tokens=24) for name in "ab"]
    server.step()
    first = [(request.times.first_scheduled, request.times.first_token) for request in requests]
    server.drain()
    assert server.scheduler.num_preemptions
    assert first == [(request.times.first_scheduled, request.times.first_token) for request in requests]
    for times in (request.times for request in requests):
        assert times.queued <= times.first_scheduled <= times.first_token <= times.finished


def test_a_plan_is_plain_data():
    server = Server(blocks=8)
    server.add("a", prompt(5), min_tokens=2, stop_token_ids=[1])
    plan, _ = server.begin()
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_an_id_in_use_is_refused_and_may_be_used_again_later():
    server = Server(blocks=8)
    server.add("a", prompt(3), max_tokens=1)
    with pytest.raises(RequestError, match="'a' is in use"):
        server.add("a", prompt(3))
    server.drain()
    server.add("a", prompt(3), max_tokens=1)
    server.drain()


def test_a_step_in_flight_must_end_before_the_next():
    server = Server(blocks=8)
    server.add("a", prompt(3))
    plan, sampled = server.begin()
    with pytest.raises(AssertionError, match="in flight"):
        server.scheduler.schedule()
    with pytest.raises(AssertionError, match="2 tokens for 1"):
        server.scheduler.update(plan, [*sampled, 0])


def test_a_random_workload_keeps_the_books_and_gives_everyone_their_tokens():
    server = Server(blocks=24, seqs=6, budget=24, chunk=9, eos=(4,))
    random_ = random.Random(0)
    for i in range(500):
        server.add(f"r{i}", prompt(random_.randint(1, 30), i), max_tokens=random_.randint(1, 30))
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


def test_nothing_of_a_finished_request_is_kept():
    server = Server(blocks=32, seqs=8)

    def serve(count):
        for i in range(count):
            server.add(f"r{i}", prompt(3), max_tokens=2)
            if i % 8 == 7:
                while server.scheduler.has_work:
                    server.scheduler.update(*server.begin())
                server.requests.clear()
        gc.collect()
        return len(gc.get_objects())

    serve(200)
    before = serve(800)
    assert serve(3200) <= before + 50


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len", "prefill_chunk"])
def test_limits_below_the_least_are_refused_by_name(name):
    good = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 2, "prefill_chunk": 1}
    SchedulerConfig(**good)
    with pytest.raises(ConfigError, match=f"{name} is 0; wanted at least"):
        SchedulerConfig(**{**good, name: 0})
