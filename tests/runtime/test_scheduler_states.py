"""Any sequence of events leaves the scheduler's books right and gives each request its own tokens."""

from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from lamina.common.errors import RequestError
from lamina.runtime.request import RequestStatus

TOKENS = st.integers(0, 10)  # the vocabulary of the simulated model


class Clock:
    """Stands still unless told otherwise."""

    now = 0.0

    def __call__(self):
        return self.now


class SchedulerMachine(RuleBasedStateMachine):
    """Any sequence of adds, steps, failed steps, aborts and stops, under any limits."""

    def __init__(self, make_server):
        super().__init__()
        self.make_server = make_server

    @initialize(
        blocks=st.integers(1, 8),
        block_size=st.integers(1, 4),
        seqs=st.integers(1, 4),
        budget=st.integers(1, 12),
        beside_decode=st.none() | st.integers(1, 12),
        context=st.integers(2, 30),
        chunk=st.none() | st.integers(1, 5),
        eos=st.sets(TOKENS, max_size=1),
        depth=st.integers(1, 3),
        prefix_cache=st.booleans(),
        window=st.none() | st.integers(1, 10),
    )
    def start(self, eos, **limits):
        self.clock = Clock()
        self.server = self.make_server(eos=tuple(eos), clock=self.clock, **limits)
        self.scheduler = self.server.scheduler
        self.ended_early = set()

    @rule(
        length=st.integers(1, 16),
        seed=st.integers(0, 3),
        options=st.fixed_dictionaries(
            {
                "priority": st.integers(-1, 1),
                "cache_salt": st.sampled_from(["", "", "salt"]),
                "timeout": st.none() | st.integers(1, 30),
            }
        ),
        max_tokens=st.none() | st.integers(1, 20),
        min_tokens=st.integers(0, 4),
        stop_token_ids=st.lists(TOKENS, max_size=2),
        ignore_eos=st.booleans(),
        penalty=st.sampled_from([0.0, 1.0]),
    )
    def add(self, length, seed, options, max_tokens, min_tokens, stop_token_ids, ignore_eos, penalty):
        limit = min(self.server.config.max_model_len - 1, self.server.kv_cache.capacity_tokens)
        arguments = {"max_tokens": max_tokens, "stop_token_ids": stop_token_ids, "ignore_eos": ignore_eos}
        arguments |= {"options": options, "presence_penalty": penalty}
        arguments["min_tokens"] = min(min_tokens, max_tokens or min_tokens)
        if length > limit:
            with pytest.raises(RequestError):
                self.server.add("too long", length, seed, **arguments)
        else:
            self.server.add(f"r{len(self.server.requests)}", length, seed, **arguments)

    @rule()
    def step(self):
        self.launch()
        if len(self.server.pending) >= self.server.depth:
            self.land()

    @rule(
        data=st.data(),
        more=st.lists(TOKENS, min_size=1, max_size=3),
        cache_salt=st.sampled_from(["", "salt"]),
    )
    def fork(self, data, more, cache_salt):
        """Go on from what a request has so far, as another sample or the next turn does."""
        if not self.server.requests:
            return
        source = self.server.requests[data.draw(st.sampled_from(sorted(self.server.requests)))]
        prompt = (*source.prompt_token_ids, *source.output_token_ids, *more)
        if len(prompt) <= min(self.server.config.max_model_len - 1, self.server.kv_cache.capacity_tokens):
            name = f"r{len(self.server.requests)}"
            self.server.add(name, prompt, max_tokens=5, options={"cache_salt": cache_salt})

    @rule()
    def restart(self):
        """What an engine does when an interrupt may have left the books half written."""
        self.ended_early.update(r.request_id for r in self.live())
        self.server.pending.clear()
        self.server.written.clear()
        self.scheduler.end_all()

    @rule(seconds=st.integers(1, 20))
    def wait(self, seconds):
        """Time passes, and ends whose time is up."""
        self.server.scheduler.check()
        self.clock.now += seconds
        self.ended_early.update(request.request_id for request in self.scheduler.expire())

    @rule(number=st.integers(0, 2))
    def fail_a_step(self, number):
        """At the model or when it is read: those launched after it go with it."""
        if number < len(self.server.pending):
            self.server.fail(number)

    @rule()
    def land(self):
        """Read a step before others are launched, as when nothing more can be."""
        if self.server.pending:
            plan = self.server.pending[0][0]
            names = [part.request_id for part in self.server.parts(plan) if part.samples]
            live = {r.request_id for r in self.live()}
            received = self.server.land()
            assert [r.request_id for r in received] == [name for name in names if name in live]

    @rule(data=st.data())
    def abort(self, data):
        assert not self.scheduler.abort("unknown")
        victim = self.end(data, lambda name: self.scheduler.abort(name))
        assert victim is None or not self.scheduler.abort(victim), "twice is a no-op"

    @rule(data=st.data())
    def stop(self, data):
        """What an engine does when it finds a stop string."""
        self.end(data, lambda name: self.scheduler.finish(name, "stop", "text"))

    def live(self):
        return [r for r in self.server.requests.values() if r.status is not RequestStatus.FINISHED]

    def end(self, data, how):
        live = [r.request_id for r in self.live()]
        if not live:
            return None
        name = data.draw(st.sampled_from(live))
        how(name)
        self.ended_early.add(name)
        return name

    def launch(self):
        live, pending = self.live(), len(self.server.pending)
        running = [r for r in live if r.status is RequestStatus.RUNNING]
        first = min(running or live, key=lambda r: r.rank, default=None)
        before = first and self.scheduler.num_computed_tokens(first)
        plan = self.server.launch()
        if plan is not None:
            self.check_plan(plan)
        assert plan is not None or pending or not live
        if live and not pending:
            assert first.request_id in plan.request_ids, "the first of those that run did not advance"
            assert self.scheduler.num_computed_tokens(first) > before

    def check_plan(self, plan):
        config, parts = self.server.config, self.server.parts(plan)
        assert 0 < plan.num_tokens == plan.counts.sum() <= config.max_num_batched_tokens
        if any(r.num_computed >= len(self.server.requests[r.request_id].prompt_token_ids) for r in parts):
            assert plan.num_tokens <= (config.max_tokens_beside_decode or plan.num_tokens)
        assert len(set(plan.request_ids)) == len(parts) <= config.max_num_seqs
        assert all(0 < len(r.token_ids) <= (config.prefill_chunk or plan.num_tokens) for r in parts)
        assert not set(plan.request_ids) & set(plan.preempted_ids)
        for part in parts:
            request = self.server.requests[part.request_id]
            assert request.status is RequestStatus.RUNNING
            assert part.num_computed + len(part.token_ids) < request.max_total_tokens, "computed for nothing"
            if part.num_computed + len(part.token_ids) < len(request.prompt_token_ids):
                assert not part.samples, "a chunk that is not the last samples nothing"

    @invariant()
    def nothing_that_a_step_in_flight_writes_is_free(self):
        if hasattr(self, "server"):
            for block_id in set().union(*self.server.written):
                assert self.server.pool.references(block_id) > 0, f"block {block_id}"

    @invariant()
    def everything_adds_up(self):
        if not hasattr(self, "server"):
            return
        self.scheduler.check()
        pool = self.server.pool
        assert pool.num_free + pool.num_used + pool.num_cached == pool.num_usable
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


def test_any_sequence_of_events_gives_each_request_its_own_tokens(make_server):
    limits = settings(max_examples=10 * settings.default.max_examples, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(partial(SchedulerMachine, make_server), settings=limits)
