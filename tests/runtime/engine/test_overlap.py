"""Several steps in flight: planned from counts, tokens fed on the device, nothing computed past a length."""

from dataclasses import replace

import pytest

from lamina import Runtime, SamplingParams
from lamina.runtime.protocol.scheduler_output import ON_HOST
from lamina.runtime.scheduler.request import RequestStatus
from lamina.runtime.startup import engine_builder
from lamina.runtime.worker.launched_step import LaunchedStep
from lamina.runtime.worker.model_runner import ModelRunner

DEPTHS = (1, 2, 3)


def computed(plans, name):
    """How many tokens of a request the plans computed in all."""
    return sum(
        count
        for plan in plans
        for request_id, count in zip(plan.request_ids, plan.num_scheduled_tokens.tolist(), strict=True)
        if request_id == name
    )


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_length_is_known_from_counts_so_that_no_token_is_computed_in_vain(make_server, depth):
    server = make_server(blocks=20, depth=depth)
    lengths = {"a": 1, "b": 2, "c": 9}
    for name, length in lengths.items():
        server.add(name, 5, max_tokens=length)
    plans = server.drain()
    for name, length in lengths.items():
        assert computed(plans, name) == 5 + length - 1  # the last token is only ever read
        assert server.requests[name].output_token_ids == server.alone(server.requests[name])[0]


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_id_that_stops_costs_a_token_for_each_further_step_in_flight(make_server, depth):
    server = make_server(
        blocks=20, depth=depth, eos=(7,), next_token=lambda prefix, banned: 7 - (len(prefix) < 9)
    )
    request = server.add("a", 5)
    plans = server.drain()
    assert request.output_token_ids == [6] * 4 + [7]
    assert computed(plans, "a") == 5 + 4 + (depth - 1)


def test_a_token_that_the_host_has_not_read_is_taken_from_the_samples_of_the_step_before(make_server):
    server = make_server(blocks=20)
    request = server.add("a", 5, max_tokens=4)
    first, second = server.launch(), server.launch()
    assert first.sources.tolist() == [ON_HOST]
    assert second.sources.tolist() == [0]
    server.land()
    server.land()
    third = server.launch()
    assert third.sources.tolist() == [ON_HOST], "the host has read it meanwhile"
    assert third.token_ids.tolist() == request.output_token_ids[-1:]
    server.drain()
    assert request.output_token_ids == server.alone(request)[0]


def test_chunks_that_are_not_the_last_sample_nothing(make_server):
    server = make_server(blocks=20, chunk=4, depth=2)
    request = server.add("a", 11, max_tokens=3)
    plans = server.drain()
    assert [plan.num_sampled_tokens.tolist() for plan in plans] == [[0], [0], [1], [1], [1]]
    assert request.output_token_ids == server.alone(request)[0]


def test_blocks_of_a_stopped_request_are_free_only_when_the_last_step_that_may_write_them_is_over(
    make_server,
):
    server = make_server(blocks=6, eos=(7,), next_token=lambda prefix, banned: 7)
    request = server.add("a", 5)
    server.launch()
    server.launch()
    server.land()
    assert (request.finish_reason, request.output_token_ids) == ("stop", [7])
    assert server.pool.num_used == 2, "the second step still writes its token"
    assert server.land() == []
    assert server.pool.num_used == 0


def test_a_preempted_request_keeps_the_token_in_flight_and_waits_for_it(make_server):
    server = make_server(blocks=6, depth=2)
    old, young = server.add("old", 8, 1, max_tokens=12), server.add("young", 8, 2, max_tokens=12)
    while young.status is not RequestStatus.PREEMPTED:
        if len(server.pending) == 2:
            server.land()
        server.launch()
    num_known, steps = len(young.output_token_ids), [plan for plan, _ in server.pending]
    assert ["young" in plan.request_ids for plan in steps] == [True]
    assert server.pool.num_free == 0, "its blocks are written once more"
    assert server.launch() is None, "the older one waits for them"
    server.land()
    assert len(young.output_token_ids) == num_known + 1
    assert server.launch().request_ids == ("old",)
    server.drain()
    for request in (old, young):
        assert request.output_token_ids == server.alone(request)[0]


def test_whoever_needs_a_block_waits_for_those_on_their_way_back_before_anyone_is_preempted(make_server):
    server = make_server(blocks=6, depth=2)
    ending = server.add("ending", 8, 1, max_tokens=2)
    others = [server.add("older", 3, 2, max_tokens=4), server.add("younger", 4, 3, max_tokens=4)]
    server.drain()
    assert server.scheduler.num_preemptions == 0
    for request in (ending, *others):
        assert request.output_token_ids == server.alone(request)[0]


@pytest.mark.parametrize("number", [0, 1])
def test_a_failed_step_takes_those_after_it_along_and_nobody_loses_a_token(make_server, number):
    server = make_server(blocks=20)
    requests = [server.add(name, 5, seed, max_tokens=8) for seed, name in enumerate("ab")]
    server.launch()
    server.land()
    server.launch()
    server.launch()
    server.fail(number)
    assert len(server.pending) == number
    plan = server.launch()
    if number:  # the token that is still in flight must be read first
        assert plan is None
        server.land()
        plan = server.launch()
    assert plan.sources.tolist() == [ON_HOST, ON_HOST]
    assert sorted(plan.new_blocks[0].tolist()) == [0, 0, 1, 1], "all tables are sent anew"
    server.drain()
    for request in requests:
        assert request.output_token_ids == server.alone(request)[0]


def test_a_request_that_a_failure_brings_back_finds_its_row_again(make_server):
    server = make_server(blocks=20, seqs=2)
    requests = [server.add(name, 5, seed, max_tokens=1 + 4 * seed) for seed, name in enumerate("abc")]
    first, second = server.launch(), server.launch()
    assert (first.request_ids, second.request_ids) == (("a", "b"), ("b", "c"))
    server.fail(0)
    assert requests[2].status is RequestStatus.PREEMPTED
    server.drain()
    for request in requests:
        assert request.output_token_ids == server.alone(request)[0]


@pytest.mark.parametrize("depth", DEPTHS)
def test_until_min_tokens_the_ids_that_stop_are_banned_by_counts(make_server, depth):
    server = make_server(
        blocks=8, depth=depth, eos=(7,), next_token=lambda prefix, banned: 3 if 7 in banned else 7
    )
    request = server.add("a", 3, min_tokens=5)
    server.drain()
    assert request.output_token_ids == [3] * 5 + [7]


GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [[5], [7, 8, 9], [11] * 6]


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def open_at(monkeypatch, tiny_folder):
    """open_at(depth, **settings) -> Runtime of TINY that has so many steps in flight."""

    def make(depth, **settings):
        monkeypatch.setitem(engine_builder.DEPTHS, "cpu", depth)
        return Runtime.from_pretrained(tiny_folder, compile=False, **settings)

    return make


@pytest.mark.parametrize("depth", [2, 3])
def test_a_runtime_gives_the_same_tokens_at_any_depth_and_leaves_nothing(open_at, is_idle, depth):
    small = {"block_size": 2, "num_kv_blocks": 12, "max_num_batched_tokens": 5}
    stopping = SamplingParams(temperature=0, max_tokens=30)
    answers = []
    for each in (1, depth):
        with open_at(each, **small) as runtime:
            answers.append([tokens(runtime.generate(PROMPTS, params)) for params in (GREEDY, stopping)])
            assert runtime.stats()["preemptions"] > 0
            is_idle(runtime)
            stream = runtime.stream(PROMPTS[0], GREEDY)
            next(stream)
            stream.close()
            is_idle(runtime)
    assert answers[0] == answers[1]


def test_at_depth_two_a_step_is_launched_before_the_last_one_is_read(open_at, monkeypatch):
    events = []
    execute, read = ModelRunner.execute, LaunchedStep.read

    def launch(self, plan):
        events.append(("launch", plan.step))
        handle = execute(self, plan)
        handle.step = plan.step
        return handle

    monkeypatch.setattr(ModelRunner, "execute", launch)
    monkeypatch.setattr(
        LaunchedStep, "read", lambda self: (events.append(("read", self.step)), read(self))[1]
    )
    with open_at(2) as runtime:
        runtime.generate([[5]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    steps = [
        ("launch", 1),
        ("launch", 2),
        ("read", 1),
        ("launch", 3),
        ("read", 2),
        ("launch", 4),
        ("read", 3),
    ]
    assert events == [*steps, ("read", 4)]


def test_a_stop_string_ends_a_request_before_its_processors_see_beyond_it(tiny_text_folder, monkeypatch):
    monkeypatch.setitem(engine_builder.DEPTHS, "cpu", 2)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with Runtime.from_pretrained(tiny_text_folder, compile=False) as runtime:
        text = runtime.generate("a", greedy)[0].outputs[0].text
        lengths = []

        def watch(prompt, output, logits):
            lengths.append(len(output))
            return logits

        asked = replace(greedy, stop=[text[3:5]], logits_processors=[watch])
        stopped = runtime.generate("a", asked)[0].outputs[0]
    assert stopped.finish_reason == "stop"
    assert max(lengths) == len(stopped.token_ids) - 1
