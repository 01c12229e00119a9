"""Batches in flight that share no request: stages of a pipeline compute them at the same time."""

from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

from lamina.runtime.protocol.scheduler_output import ON_HOST
from lamina.runtime.scheduler.decision_log import DecisionLog, open_decision_log
from lamina.runtime.scheduler.replay import replay
from lamina.runtime.scheduler.scheduler import Scheduler

from .test_scheduler_states import ARRIVALS, SchedulerMachine


def samplers(plan):
    return {part for part, count in zip(plan.request_ids, plan.num_sampled_tokens, strict=True) if count}


class BatchMachine(SchedulerMachine):
    """Any sequence of events where up to as many batches are in flight as there are stages."""

    @initialize(
        blocks=st.sampled_from([8, 6, 10, 4, 2]),
        block_size=st.integers(1, 4),
        seqs=st.sampled_from([3, 4, 5, 2, 1]),
        budget=st.sampled_from([12, 20, 8, 5, 1]),
        context=st.sampled_from([30, 20, 8]),
        chunk=st.none() | st.integers(1, 5),
        eos=st.sampled_from([(), (5,)]),
        batches=st.integers(2, 4),
        prefix_cache=st.booleans(),
        window=st.none() | st.integers(1, 10),
        swap=st.sampled_from([0, 3, 8]),
        forced=st.sampled_from([0, 2, 9]),
        drafts=st.sampled_from([0, 3, 1, 6]),
        first=st.lists(ARRIVALS, min_size=2, max_size=5),
    )
    def start(self, batches, **limits):
        super().start(batches=batches, depth=batches, **limits)

    def check_plan(self, plan, running):
        super().check_plan(plan, running)
        assert (plan.sources == ON_HOST).all(), "a token that no other stage knows"
        for earlier, _ in [*self.server.pending][:-1]:
            assert not samplers(earlier) & {*plan.request_ids}, "a request in two batches"


def test_any_sequence_of_events_gives_each_request_its_own_tokens(make_server):
    limits = settings(max_examples=2 * settings.default.max_examples, stateful_step_count=20, deadline=None)
    run_state_machine_as_test(partial(BatchMachine, make_server), settings=limits)


@pytest.mark.parametrize("batches", [2, 3])
def test_requests_are_shared_out_evenly_among_batches(make_server, batches):
    server = make_server(blocks=400, seqs=16, batches=batches, depth=batches, context=64)
    for number in range(7):
        server.add(str(number), length=3, seed=number, max_tokens=20, ignore_eos=True)
    most = -(-7 // batches)
    plans = server.drain()
    for plan, following in zip(plans[batches:30], plans[batches + 1 : 31], strict=True):
        assert plan.num_rows <= most
        assert not {*plan.request_ids} & {*following.request_ids}
    assert sum(plan.num_rows for plan in plans[batches : 2 * batches]) == 7, "everybody advances in a round"


def test_chunks_of_a_prompt_follow_each_other_through_the_stages(make_server):
    server = make_server(blocks=40, seqs=4, budget=4, batches=3, depth=3)
    server.add("long", length=11, max_tokens=2)
    plans = [server.launch() for _ in range(3)]
    assert [plan.num_tokens for plan in plans] == [4, 4, 3]
    assert [len(samplers(plan)) for plan in plans] == [0, 0, 1]
    assert server.launch() is None, "its token is in flight"
    server.drain()


def test_what_was_logged_is_decided_again(make_server, tmp_path):
    path = tmp_path / "log.jsonl"
    with open_decision_log(path) as file:
        server = make_server(blocks=10, block_size=2, seqs=4, batches=2, depth=2, prefix_cache=True)
        server.scheduler = Scheduler(server.config, server.kv_cache, DecisionLog(file))
        for number in range(20):
            server.add(str(number), number % 7 + 1, number % 3, max_tokens=number % 9 + 1)
            server.step()
        server.drain()
    result = replay(path)
    assert result.difference is None
    assert result.num_preemptions == server.scheduler.num_preemptions > 0
