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
from lamina.runtime.scheduler.request import RequestStatus

from ..tally import SCHEDULER

TOKENS = st.integers(0, 10)  # the vocabulary of the simulated model
STEPS = st.integers(0, 3)  # that follow an event, so that there is always something under way
SALTS = st.sampled_from(["", "", "salt"])
ARRIVALS = st.fixed_dictionaries(
    {
        "length": st.sampled_from([5, 3, 8, 12, 2, 1, 16]),
        "seed": st.integers(0, 3),
        "options": st.fixed_dictionaries(
            {
                "priority": st.integers(-1, 1),
                "cache_salt": SALTS,
                "timeout": st.sampled_from([None, None, 3, 12, 30]),
            }
        ),
        "max_tokens": st.sampled_from([None, 20, 12, 8, 4, 2, 1]),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.sampled_from([(), (), (3,), (0, 7)]),
        "ignore_eos": st.booleans(),
        "presence_penalty": st.sampled_from([0.0, 1.0]),
    }
)


def wrong_by_lot(right, lots):
    """Drafts of which some are wrong, and sometimes fewer than wanted."""
    return [(token + (lots.random() < 0.3)) % 11 for token in right][: lots.randint(0, len(right))]


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
        blocks=st.sampled_from([8, 6, 4, 10, 8, 2, 1]),
        block_size=st.integers(1, 4),
        seqs=st.sampled_from([3, 4, 5, 2, 1]),
        budget=st.sampled_from([12, 20, 8, 5, 1]),
        beside_decode=st.none() | st.integers(1, 12),
        prefill=st.none() | st.integers(1, 12),
        context=st.sampled_from([30, 20, 30, 8, 2]),
        chunk=st.none() | st.integers(1, 5),
        eos=st.sampled_from([(), (5,)]),
        depth=st.integers(1, 3),
        prefix_cache=st.booleans(),
        window=st.none() | st.integers(1, 10),
        swap=st.sampled_from([8, 3, 1, 0]),
        forced=st.sampled_from([0, 2, 9]),
        drafts=st.sampled_from([0, 3, 1, 6]),
        first=st.lists(ARRIVALS, min_size=2, max_size=5),
    )
    def start(self, eos, first, **limits):
        self.clock = Clock()
        if limits["window"] or not limits["prefix_cache"]:
            limits["swap"] = 0
        limits.setdefault("drafts", 0)
        limits["script"] = wrong_by_lot
        self.server = self.make_server(eos=eos, clock=self.clock, **limits)
        self.scheduler = self.server.scheduler
        self.ended_early = set()
        names = {
            "with windows": limits["window"],
            "with a prefix cache": limits["prefix_cache"],
            "with slots to swap to": limits["swap"],
            "with forced tokens": limits["forced"],
            "with drafts": limits["drafts"],
        }
        SCHEDULER.update(programs=1, **{f"programs {name}": 1 for name, is_on in names.items() if is_on})
        self.first = first
        self.arrive()

    @rule(arrivals=st.lists(ARRIVALS, min_size=1, max_size=3), steps=STEPS)
    def add(self, arrivals, steps):
        for arrival in arrivals:
            self.queue(**arrival)
        self.steps(steps)

    def arrive(self):
        for arrival in self.first:
            self.queue(**arrival)

    def queue(self, *, length, max_tokens, min_tokens, **more):
        """As long as that; one that cannot fit is refused, and comes again as short as it must be."""
        more |= {"max_tokens": max_tokens, "min_tokens": min(min_tokens, max_tokens or min_tokens)}
        limit = self.longest_prompt()
        if length > limit:
            with pytest.raises(RequestError):
                self.server.add("too long", length, **more)
            SCHEDULER["requests refused"] += 1
        self.server.add(f"r{len(self.server.requests)}", min(length, limit), **more)

    def longest_prompt(self):
        return min(self.server.config.max_model_len - 1, self.server.kv_cache.capacity_tokens)

    @rule(count=st.sampled_from([4, 8, 2, 1]))
    def steps(self, count):
        """Where nobody is live, the first ones come again."""
        for _ in range(count):
            if not self.scheduler.has_work:
                self.arrive()
            self.launch()
            if len(self.server.pending) >= self.server.depth:
                self.receive()

    @rule(
        which=st.integers(0, 7), more=st.lists(TOKENS, min_size=1, max_size=3), cache_salt=SALTS, steps=STEPS
    )
    def fork(self, which, more, cache_salt, steps):
        """Go on from what a request has so far, as another sample or the next turn does."""
        sources = [*self.server.requests.values()]
        source = sources[which % len(sources)]
        prompt = (*source.prompt_token_ids, *source.output_token_ids, *more)[: self.longest_prompt()]
        name = f"r{len(self.server.requests)}"
        self.server.add(name, prompt, max_tokens=8, options={"cache_salt": cache_salt})
        SCHEDULER["forks"] += 1
        self.steps(steps)

    @rule(really=st.integers(0, 4))
    def restart(self, really):
        """What an engine does, rarely, when an interrupt may have left the books half written."""
        if really:
            return
        self.server.pending.clear()
        self.server.written.clear()
        self.scheduler.reopen()
        SCHEDULER["restarts"] += 1

    @rule(seconds=st.integers(1, 20))
    def wait(self, seconds):
        """Time passes, and ends whose time is up."""
        self.server.scheduler.check()
        self.clock.now += seconds
        late = self.scheduler.expire()
        self.ended_early.update(request.request_id for request in late)
        SCHEDULER["deadlines passed"] += len(late)

    @rule(number=st.integers(0, 2), steps=STEPS)
    def fail_a_step(self, number, steps):
        """At the model or when it is read: those launched after it go with it."""
        if number < len(self.server.pending):
            SCHEDULER["failed steps"] += len(self.server.pending) - number
            self.server.fail(number)
        self.steps(steps)

    @rule(steps=STEPS)
    def land(self, steps):
        """Read a step before others are launched, as when nothing more can be."""
        self.receive()
        self.steps(steps)

    def receive(self):
        if self.server.pending:
            plan = self.server.pending[0][0]
            parts = [part for part in self.server.parts(plan) if part.samples]
            known = {r.request_id: r.num_tokens for r in self.live()}
            newest = self.server.newest[plan.step]
            names = [part.request_id for part in parts if part.request_id in known]
            news = [name for name in names if newest[name] >= known[name]]
            received = self.server.land()
            assert [r.request_id for r in received] == news, "not those who had not been told of their token"

    @rule(which=st.integers(0, 7), steps=STEPS)
    def abort(self, which, steps):
        assert not self.scheduler.abort("unknown")
        victim = self.end(which, lambda name: self.scheduler.abort(name))
        assert victim is None or not self.scheduler.abort(victim), "twice is a no-op"
        SCHEDULER["aborts"] += victim is not None
        self.steps(steps)

    @rule(which=st.integers(0, 7), steps=STEPS)
    def stop(self, which, steps):
        """What an engine does when it finds a stop string."""
        ended = self.end(which, lambda name: self.scheduler.finish(name, "stop", "text"))
        SCHEDULER["stops"] += ended is not None
        self.steps(steps)

    def known_blocks(self):
        prefix = self.server.kv_cache.prefix
        return set() if prefix is None else {*prefix.block_ids()}

    def live(self):
        return [r for r in self.server.requests.values() if r.status is not RequestStatus.FINISHED]

    def end(self, which, how):
        live = [r.request_id for r in self.live()]
        if not live:
            return None
        name = live[which % len(live)]
        how(name)
        self.ended_early.add(name)
        return name

    def launch(self):
        live, pending = self.live(), len(self.server.pending)
        running = [r for r in live if r.status is RequestStatus.RUNNING]
        first = min(running or live, key=lambda r: r.rank, default=None)
        before = first and self.scheduler.num_computed_tokens(first)
        known = self.known_blocks()
        plan = self.server.launch()
        if plan is not None:
            self.check_plan(plan, {request.request_id for request in running})
            SCHEDULER["steps"] += 1
        SCHEDULER["blocks evicted"] += len(known - self.known_blocks())
        assert plan is not None or pending or not live
        if live and not pending:
            assert first.request_id in plan.request_ids, "the first of those that run did not advance"
            assert self.scheduler.num_computed_tokens(first) > before

    def check_plan(self, plan, running):
        config, parts = self.server.config, self.server.parts(plan)
        assert 0 < plan.num_tokens == plan.num_scheduled_tokens.sum() <= config.max_num_batched_tokens
        drafts = (plan.num_sampled_tokens - 1).clip(0).tolist()  # for which none of the other limits are
        num_tokens = plan.num_tokens - sum(drafts)
        # not those that come back in this step
        answering = [part for part in parts if part.request_id in running]
        if any(r.num_computed >= len(self.server.requests[r.request_id].prompt_token_ids) for r in answering):
            assert num_tokens <= (config.max_tokens_beside_decode or num_tokens)
        if config.max_prefill_tokens is not None:  # beyond one of each running request, which may sit it out
            num_running = len(running | set(plan.request_ids))
            assert num_tokens <= config.max_prefill_tokens + num_running
        assert len(set(plan.request_ids)) == len(parts) <= config.max_num_seqs
        counts = [len(part.token_ids) - more for part, more in zip(parts, drafts, strict=True)]
        assert all(0 < count <= (config.prefill_chunk or num_tokens) for count in counts)
        assert all(self.server.requests[name].num_preemptions for name in plan.preempted_ids)
        for part, count in zip(parts, counts, strict=True):
            request = self.server.requests[part.request_id]
            assert request.status is RequestStatus.RUNNING
            assert part.num_computed + count < request.max_total_tokens, "computed for nothing"
            if part.num_computed + count < len(request.prompt_token_ids):
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
        swap = self.server.kv_cache.swap
        SCHEDULER.update(
            {
                "requests": len(self.server.requests),
                "requests served to their end": len(self.server.requests.keys() - self.ended_early),
                "tokens forced": self.scheduler.num_forced_tokens,
                "preemptions": self.scheduler.num_preemptions,
                "prefix-cache hits": self.scheduler.num_hit_tokens,
                "blocks swapped out": swap.num_out if swap else 0,
                "blocks swapped in": swap.num_in if swap else 0,
            }
        )


class SwapMachine(SchedulerMachine):
    """The same where answers are long, the cache is small, and the host has slots for what goes from it."""

    @initialize(
        blocks=st.integers(6, 14),
        block_size=st.integers(1, 2),
        seqs=st.integers(3, 5),
        budget=st.sampled_from([20, 8]),
        chunk=st.none() | st.integers(2, 5),
        depth=st.integers(1, 3),
        swap=st.sampled_from([16, 8, 3, 1]),
        forced=st.sampled_from([0, 5]),
        drafts=st.sampled_from([0, 2]),
        lengths=st.lists(st.integers(1, 6), min_size=4, max_size=7),
    )
    def start(self, lengths, **limits):
        first = [{"length": length, "seed": length % 4, "options": {}} for length in lengths]
        longest = {"max_tokens": None, "min_tokens": 0, "ignore_eos": True}
        super().start(
            eos=(),
            first=[arrival | longest for arrival in first],
            context=30,
            prefix_cache=True,
            window=None,
            **limits,
        )


@pytest.mark.parametrize("machine, factor", [(SchedulerMachine, 10), (SwapMachine, 3)])
def test_any_sequence_of_events_gives_each_request_its_own_tokens(make_server, machine, factor):
    examples = factor * settings.default.max_examples
    limits = settings(max_examples=examples, stateful_step_count=20, deadline=None)
    run_state_machine_as_test(partial(machine, make_server), settings=limits)
