"""Rows that sample several tokens: as many count as hold, wherever a stop, a length or an abort cuts them."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.runtime.protocol.runner_output import RunnerOutput
from lamina.runtime.protocol.scheduler_output import ON_HOST, StepLogprobs, TokenLogprobs
from lamina.runtime.scheduler.logprob_requests import wanted_logprobs

from ..paged_model import VOCAB


class DraftingServer:
    """A server whose plans ask for more than schedule() does: drafts follow the newest tokens of rows.

    Each draft is right or wrong by lot; a row yields its next token, and one for each draft that holds.
    """

    def __init__(self, server, most, seed):
        self.server, self.most, self.lots = server, most, random.Random(seed)
        self.scheduler, planner = server.scheduler, server.scheduler._planner
        self._plan, planner.plan = planner.plan, self.plan_with_drafts
        self.drafts = {}  # by step, the drafts of each row
        self.num_held = self.num_dropped = 0

    def answer(self, request):
        """The tokens that a request gets in all, and some that could come after them."""
        return [*request.prompt_token_ids, *self.server.alone(request)[0], *range(self.most)]

    def plan_with_drafts(self, counts):
        plan, batch = self._plan(counts), self.scheduler._batch
        drafts, room = [], self.server.config.max_num_seqs - plan.num_samples
        for row, request in enumerate(batch.requests[: plan.num_rows]):
            end = int(plan.num_computed_tokens[row] + plan.num_scheduled_tokens[row])
            may_draft = plan.num_sampled_tokens[row] and not request.params.adjusts
            own_room = (
                len(self.server.kv_cache.block_ids(request.request_id)) * self.server.kv_cache.block_size
            )
            num = self.lots.randint(0, max(0, min(self.most, room, own_room - end))) if may_draft else 0
            right = self.answer(request)[end : end + num] if num else []
            drafts.append([(token + (self.lots.random() < 0.3)) % VOCAB for token in right])
            room -= len(drafts[-1])
        self.drafts[plan.step] = drafts
        return with_drafts(plan, batch, drafts)

    def launch(self):
        plan = self.server.launch()
        if plan is not None:
            _, output = self.server.pending.pop()
            self.server.pending.append((plan, self.held(plan, output.token_ids.tolist())))
        return plan

    def held(self, plan, sampled):
        """What a runner gives: tokens that hold, log-probabilities of all samples, how many each row has."""
        tokens, counts, start = [], [], 0
        for row, num in enumerate(plan.num_sampled_tokens.tolist()):
            own, drafts = sampled[start : start + num], self.drafts[plan.step][row]
            right = [*(token == draft for token, draft in zip(own, drafts, strict=False)), False]
            counts.append(min(num, right.index(False) + 1))
            tokens += own[: counts[-1]]
            start += num
            self.num_held += max(0, counts[-1] - 1)
            self.num_dropped += num - counts[-1]
        wanted = [] if plan.wanted_logprobs is None else plan.wanted_logprobs.samples.tolist()
        found = tuple(TokenLogprobs((sampled[n],), (0.0,), 1) for n in wanted)
        logprobs = StepLogprobs(samples=found, prompts=())
        token_ids, num_sampled = np.array(tokens, np.int32), np.array(counts, np.int64)
        return RunnerOutput(token_ids=token_ids, num_sampled=num_sampled, logprobs=logprobs)

    def drain(self, depth):
        while self.scheduler.has_work or self.server.pending:
            plan = self.launch()
            if self.server.pending and (plan is None or len(self.server.pending) >= depth):
                self.server.land()
        assert self.server.pool.num_used == 0


def with_drafts(plan, batch, drafts):
    """The plan with these tokens after those of each row, which it samples, too."""
    more = np.array([len(own) for own in drafts], np.int64)
    counts, num_sampled = plan.num_scheduled_tokens + more, plan.num_sampled_tokens + more
    parts = np.split(plan.token_ids, np.cumsum(plan.num_scheduled_tokens)[:-1])
    token_ids = [token for part, own in zip(parts, drafts, strict=True) for token in [*part, *own]]
    adjusted = plan.adjusted
    if adjusted is not None:
        places = (np.cumsum(num_sampled) - 1)[plan.sample_rows[adjusted.samples]]
        adjusted = dataclasses.replace(adjusted, samples=places)
    return dataclasses.replace(
        plan,
        num_scheduled_tokens=counts,
        num_sampled_tokens=num_sampled,
        token_ids=np.array(token_ids, np.int32),
        sampling=batch.sampling.parameters(num_sampled),
        adjusted=adjusted,
        banned=batch.sampling.banned(num_sampled),
        wanted_logprobs=wanted_logprobs(batch, counts, num_sampled),
    )


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
    most=st.integers(1, 5),
    depth=st.integers(1, 3),
    seed=st.integers(0, 9),
    aborted=st.none() | st.integers(0, 4),
    limits=st.fixed_dictionaries(
        {
            "blocks": st.integers(8, 24),
            "block_size": st.integers(1, 4),
            "chunk": st.none() | st.integers(1, 5),
            "eos": st.sampled_from([(), (5,)]),
            "prefix_cache": st.booleans(),
            "window": st.none() | st.integers(1, 10),
        }
    ),
)
def test_rows_that_yield_several_tokens_get_those_that_they_get_one_by_one(
    make_server, arrivals, most, depth, seed, aborted, limits
):
    server = make_server(seqs=8, context=40, **limits)
    drafting = DraftingServer(server, most, seed)
    longest = min(server.kv_cache.capacity_tokens, 39)
    for number, arrival in enumerate(arrivals):
        own = arrival | {"min_tokens": min(arrival["min_tokens"], arrival["max_tokens"])}
        server.add(f"r{number}", min(own.pop("length"), longest), **own)
    for _ in range(3):
        drafting.launch()
        if len(server.pending) >= depth:
            server.land()
    if aborted is not None:
        server.scheduler.abort(f"r{aborted}")
    drafting.drain(depth)
    for request in server.requests.values():
        tokens, reason = server.alone(request)
        count = len(request.output_token_ids)
        assert request.output_token_ids == tokens[:count]
        assert request.finish_reason == "abort" or (count, request.finish_reason) == (len(tokens), reason)
        reports = [report.token_ids[0] for report in request.logprobs]
        assert reports == ([] if request.params.logprobs is None else request.output_token_ids)


def test_several_tokens_a_step_take_fewer_steps_and_what_is_wrong_is_computed_again(make_server):
    server = make_server(blocks=10, block_size=16, seqs=8)
    drafting = DraftingServer(server, 3, 0)
    requests = [server.add(name, 5, seed, max_tokens=40) for seed, name in enumerate("ab")]
    drafting.drain(1)
    assert server.scheduler._in_flight.num_launched < 40
    assert drafting.num_held > 10
    assert drafting.num_dropped > 10
    assert all(request.output_token_ids == server.alone(request)[0] for request in requests)


def test_a_row_whose_drafts_are_not_judged_yet_sits_out_the_steps_until_they_are(make_server):
    server = make_server(blocks=40, seqs=8)
    server.add("a", 3, 2, max_tokens=12)
    server.step()
    drafting = DraftingServer(server, 2, 1)
    while drafting.launch().num_sampled_tokens.tolist() == [1]:
        pass
    assert server.scheduler.schedule() is None
    while server.pending:
        server.land()
    assert server.scheduler.schedule().sources.tolist() == [ON_HOST]


@pytest.mark.parametrize("counts", [[0], [3], [1, 1]])
def test_fewer_tokens_than_one_or_more_than_were_sampled_are_refused(make_server, counts):
    server = make_server(blocks=8)
    server.add("a", 3)
    plan = server.launch()
    tokens = np.ones(sum(counts), np.int32)
    output = RunnerOutput(token_ids=tokens, num_sampled=np.array(counts, np.int64))
    with pytest.raises(AssertionError, match="rows yielded"):
        server.scheduler.update(plan, output)
