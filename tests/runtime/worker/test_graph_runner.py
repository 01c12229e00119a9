"""Captured steps: padding that may hold anything, sizes at every bound, when each is captured, snapshots."""

import contextlib

import pytest
import torch

from lamina import CompileConfig, Runtime, SamplingParams
from lamina.compiler.execution.cuda_graphs import CudaGraphs
from lamina.runtime.startup import captures, engine_builder
from lamina.runtime.worker.graph_runner import STEPS_BEFORE_CAPTURE, Decode, GraphRunner, PlannedCaptures
from lamina.runtime.worker.input_batch import MAX_BANNED, InputBatch

from .. import every_line
from ..every_line import happening, raising, traced

pytestmark = pytest.mark.timeout(600)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def prompts(count):
    return [[(5 + 17 * row + 3 * place) % 320 for place in range(1 + row % 7)] for row in range(count)]


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def open_captured(tiny_folder, compile_cache):
    with contextlib.ExitStack() as stack:

        def make(graphs, **settings):
            config = CompileConfig(cuda_graphs=graphs)
            cache = {"compile": config, "cache_dir": compile_cache, "dtype": "float32", "device": "cpu"}
            return stack.enter_context(Runtime.from_pretrained(tiny_folder, **cache, **settings))

        yield make


@pytest.fixture(scope="module")
def uncaptured(open_captured):
    """uncaptured(count) -> tokens of as many prompts without captures."""
    runtime = open_captured("off")
    answers = tokens(runtime.generate(prompts(17), GREEDY))
    return lambda count: answers[:count]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 17])
def test_batches_at_and_above_the_largest_captured_size_are_right(open_captured, uncaptured, count):
    runtime = open_captured("on", max_num_seqs=8)
    assert max(size for kind, size in runtime.stats()["cuda_graphs"]["sizes"] if kind == "decode") == 8
    assert tokens(runtime.generate(prompts(count), GREEDY)) == uncaptured(count)


def test_steps_of_a_cpu_by_call_graphs_give_the_same_tokens(open_captured, uncaptured):
    runtime = open_captured("auto")
    for count in (1, 9, 17, 9):
        assert tokens(runtime.generate(prompts(count), GREEDY)) == uncaptured(count)
    stats = runtime.stats()
    assert stats["cpu_call_graphs"]["replays"] > 0
    assert (stats["cuda_graphs"]["replays"], stats["cuda_graphs"]["sizes"]) == (0, [])


def test_steps_whose_samples_are_in_a_call_graph_take_turns_with_others(open_captured):
    """What is asked of logits beyond a sample is asked outside; the rows beside it are sampled as before."""
    common = {"max_tokens": 8, "ignore_eos": True, "seed": 3}
    asked = [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=1, top_k=5, **common),
        SamplingParams(temperature=0, logprobs=2, **common),
        SamplingParams(temperature=0, logit_bias={7: 100.0}, **common),
        SamplingParams(temperature=1, min_tokens=4, stop_token_ids=list(range(40)), **common),
    ]
    plain, captured = open_captured("off"), open_captured("auto")
    for count in (2, 5):
        for _ in range(3):
            for params in ([asked[0]] * count, asked[:count], [asked[1]] * count):
                outputs = captured.generate(prompts(count), params)
                assert tokens(outputs) == tokens(plain.generate(prompts(count), params))
    assert captured.stats()["cpu_call_graphs"]["replays"] > 0


def test_what_lies_in_padding_reaches_no_real_row(open_captured, uncaptured, monkeypatch):
    runtime = open_captured("on", max_num_seqs=32)
    write = InputBatch.write

    def poisoned(input_batch, plan, *sizes, **padding):
        batch = write(input_batch, plan, *sizes, **padding)
        rows = plan.num_samples
        for settings in (batch.temperature, batch.top_p, batch.min_p):
            settings[rows:] = torch.nan
        batch.positions[plan.num_tokens :] = 3
        return batch

    monkeypatch.setattr(InputBatch, "write", poisoned)
    assert tokens(runtime.generate(prompts(9), GREEDY)) == uncaptured(9)
    assert runtime.stats()["cuda_graphs"]["padded_tokens"] > 0


def test_a_lazy_runtime_serves_at_once_and_captures_only_when_idle(open_captured, uncaptured):
    runtime = open_captured("lazy", max_num_seqs=8, max_num_batched_tokens=64)
    assert runtime.stats()["cuda_graphs"]["sizes"] == []
    assert tokens(runtime.generate(prompts(3), GREEDY)) == uncaptured(3)
    stream = runtime.stream(prompts(1)[0], GREEDY)
    next(stream)
    assert not runtime.idle(), "a request is running"
    assert runtime.stats()["cuda_graphs"]["sizes"] == []
    del stream
    while runtime.idle():
        assert tokens(runtime.generate(prompts(5), GREEDY)) == uncaptured(5)
    stats = runtime.stats()["cuda_graphs"]
    everything = open_captured("on", max_num_seqs=8, max_num_batched_tokens=64).stats()["cuda_graphs"][
        "sizes"
    ]
    assert stats["sizes"] == everything
    assert stats["replays"] > 0


@pytest.fixture
def open_growing(open_captured, monkeypatch):
    """As a GPU has it: few sizes at the start, others between steps, of which two are in flight."""
    monkeypatch.setattr(captures, "captures_between_steps", lambda resolved: True)
    monkeypatch.setattr(engine_builder, "DEPTHS", {"cpu": 2})
    return lambda: open_captured("on", max_num_seqs=32, max_num_batched_tokens=64)


def decode_sizes(runtime):
    return {size for kind, size in runtime.stats()["cuda_graphs"]["sizes"] if kind == "decode"}


def test_a_size_that_steps_want_is_captured_between_two_of_them(open_growing, open_captured, caplog):
    runtime, plain = open_growing(), open_captured("off")
    assert decode_sizes(runtime) == {1, 8, 16, 32}
    for count, sizes in ((3, {4}), (2, {2, 4}), (20, {2, 4, 24})):
        drawn = {"temperature": 1.0, "seed": 7, "max_tokens": 2 * STEPS_BEFORE_CAPTURE, "ignore_eos": True}
        for params in (SamplingParams(**drawn), SamplingParams(**drawn | {"temperature": 0})):
            asked = prompts(count)
            assert tokens(runtime.generate(asked, params)) == tokens(plain.generate(asked, params))
        assert decode_sizes(runtime) == {1, 8, 16, 32} | sizes
    assert "failed" not in caplog.text
    while runtime.idle():
        pass
    assert decode_sizes(runtime) == {1, 2, 4, 8, 16, 24, 32}


def test_a_size_that_cannot_be_captured_is_given_up_and_serves_on(
    open_growing, uncaptured, monkeypatch, caplog
):
    runtime, tried = open_growing(), []

    def fail(graphs, key, *arguments):
        tried.append(key)
        raise torch.cuda.OutOfMemoryError("no room for it")

    with monkeypatch.context() as patch:
        patch.setattr(CudaGraphs, "capture", fail)
        for _ in range(4):
            assert tokens(runtime.generate(prompts(3), GREEDY)) == uncaptured(3)
    assert tried == [Decode(4)]
    assert caplog.text.count("Decode(size=4") == caplog.text.count("no room for it") == 1

    def fail_once_more(graphs, key, *arguments):
        return fail(graphs, key) if key == Decode(4) else capture(graphs, key, *arguments)

    capture, sizes = CudaGraphs.capture, runtime.stats()["cuda_graphs"]["sizes"]
    monkeypatch.setattr(CudaGraphs, "capture", fail_once_more)
    runtime.sleep()
    runtime.wake()
    assert runtime.stats()["cuda_graphs"]["sizes"] == sizes
    assert tokens(runtime.generate(prompts(3), GREEDY)) == uncaptured(3)


def test_waking_captures_what_was_captured_and_suspending_keeps_steps_from_it(open_growing, uncaptured):
    runtime, params = open_growing(), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    first = decode_sizes(runtime)
    assert first == {1, 8, 16, 32}
    runtime.generate(prompts(3), params)
    for _ in range(2):
        runtime.sleep()
        runtime.wake()
        assert decode_sizes(runtime) == first | {4}
    runtime.suspend()
    runtime.generate(prompts(20), params)
    assert tokens(runtime.generate(prompts(3), GREEDY)) == uncaptured(3)
    assert decode_sizes(runtime) == set(), "no snapshot may hold any"
    assert runtime.idle()
    runtime.generate(prompts(20), params)
    assert 24 in decode_sizes(runtime)
    runtime.resume()
    assert decode_sizes(runtime) == {1, 2, 4, 8, 16, 24, 32}


def test_suspending_drops_every_capture_and_resuming_makes_them_again(open_captured, uncaptured):
    runtime = open_captured("on", max_num_seqs=4)
    sizes = runtime.stats()["cuda_graphs"]["sizes"]
    runtime.suspend()
    assert runtime.stats()["cuda_graphs"]["sizes"] == []
    assert tokens(runtime.generate(prompts(3), GREEDY)) == uncaptured(3)
    runtime.resume()
    assert runtime.stats()["cuda_graphs"]["sizes"] == sizes
    before = runtime.stats()["cuda_graphs"]["replays"]
    assert tokens(runtime.generate(prompts(3), GREEDY)) == uncaptured(3)
    assert runtime.stats()["cuda_graphs"]["replays"] > before


def test_after_ready_no_batch_and_no_length_builds_or_captures_anything(open_captured):
    runtime = open_captured("on", max_num_seqs=8)
    sizes = runtime.stats()["cuda_graphs"]["sizes"]
    for count in range(1, 9):
        runtime.generate(prompts(count), GREEDY)
    for length in (1, 2, 3, 7, 64):
        runtime.generate([list(range(1, length + 1))], GREEDY)
    stats = runtime.stats()
    assert stats["compile"]["recompiles"] == 0
    assert stats["cuda_graphs"]["sizes"] == sizes


@pytest.fixture
def graph_runner(make_server):
    """A graph runner of a model that was not compiled, with the input batch of a server of five requests."""
    graphs = CudaGraphs(torch.device("cpu"))
    runner = GraphRunner(
        lambda *inputs: inputs[0],
        None,
        make_server(blocks=40, seqs=5).input_batch,
        cuda_graphs=graphs,
        cpu_call_graphs=None,
    )
    assert runner.plan_captures(PlannedCaptures([Decode(2), Decode(4), Decode(1)], [16])) == 3, (
        "pieces are captured of compiled models alone"
    )
    return runner


@pytest.fixture
def growing_runner(graph_runner):
    """The same, of which the size 4 alone is captured, and others as steps come."""
    planned = PlannedCaptures([Decode(1), Decode(2), Decode(4)], first={4}, between_steps=True)
    assert graph_runner.plan_captures(planned) == 1
    graph_runner.capture_next(lambda *step: None)
    return graph_runner


def plan_of(make_server, num_requests):
    server = make_server(blocks=40, seqs=5)
    for number in range(num_requests):
        server.add(f"r{number}", 1)
    return server.scheduler.schedule()


def test_the_size_that_came_often_is_captured_before_others(growing_runner, make_server):
    plan = plan_of(make_server, 1)
    for _ in range(STEPS_BEFORE_CAPTURE):
        assert growing_runner.size_for(plan) == Decode(4)
        growing_runner.capture_if_due(plan, lambda *step: None, lambda batch: None)
    assert sizes_for(growing_runner, make_server) == [1, 4, 4, 4, None]
    for _ in range(2 * STEPS_BEFORE_CAPTURE):
        growing_runner.capture_if_due(plan_of(make_server, 4), lambda *step: None, lambda batch: None)
    assert sizes_for(growing_runner, make_server) == [1, 4, 4, 4, None]


def test_an_interrupt_at_any_line_of_a_capture_between_steps_loses_no_size(growing_runner, make_server):
    plan = plan_of(make_server, 1)

    def act():
        growing_runner._wanted.clear()
        for _ in range(STEPS_BEFORE_CAPTURE):
            growing_runner.capture_if_due(plan, lambda *step: None, lambda batch: None)

    for line in range(1, 1 + every_line.count(act)):
        growing_runner.drop()
        growing_runner.capture_next(lambda *step: None)
        with contextlib.suppress(KeyboardInterrupt), traced(happening(raising(KeyboardInterrupt), line)):
            act()
        capture_all(growing_runner)
        assert sizes_for(growing_runner, make_server) == [1, 2, 4, 4, None]


def sizes_for(runner, make_server, **params):
    """What serves decode steps of 1 to 5 requests."""
    found = []
    for num_requests in range(1, 6):
        server = make_server(blocks=40, seqs=5)
        for number in range(num_requests):
            server.add(f"r{number}", 1, **params)
        size = runner.size_for(server.scheduler.schedule())
        found.append(size and size.size)
        assert size is None or isinstance(size, Decode)
    return found


def capture_all(runner):
    return [runner.capture_next(lambda *step: None) for _ in range(4)]


def test_the_smallest_size_captured_so_far_that_holds_a_step_serves_it(graph_runner, make_server):
    found = []
    for _ in range(4):
        found.append(sizes_for(graph_runner, make_server))
        graph_runner.capture_next(lambda *step: None)
    assert found == [[None] * 5, [4] * 4 + [None], [2, 2, 4, 4, None], [1, 2, 4, 4, None]]


def test_a_step_that_bans_more_than_a_graph_can_read_is_served_by_none(graph_runner, make_server):
    assert capture_all(graph_runner) == [True, True, True, False]
    few, many = (
        {"min_tokens": 2, "stop_token_ids": range(num_ids)} for num_ids in (MAX_BANNED, MAX_BANNED + 1)
    )
    assert sizes_for(graph_runner, make_server, **few) == [1, 2, 4, 4, None]
    assert sizes_for(graph_runner, make_server, **many) == [None] * 5


def test_what_was_dropped_is_captured_again_however_far_it_had_come(graph_runner, make_server):
    for done in range(4):
        for _ in range(done):
            graph_runner.capture_next(lambda *step: None)
        graph_runner.drop()
        assert sizes_for(graph_runner, make_server) == [None] * 5
    assert capture_all(graph_runner) == [True, True, True, False]


def test_an_interrupt_at_any_line_of_a_capture_or_a_drop_loses_no_size(graph_runner, make_server):
    for action in (lambda: graph_runner.capture_next(lambda *step: None), graph_runner.drop):
        graph_runner.drop()
        for line in range(1, 1 + every_line.count(action)):
            graph_runner.drop()
            graph_runner.capture_next(lambda *step: None)
            with contextlib.suppress(KeyboardInterrupt), traced(happening(raising(KeyboardInterrupt), line)):
                action()
            for size in {*sizes_for(graph_runner, make_server)} - {None}:
                assert Decode(size) in graph_runner._cuda_graphs, "a size serves that is not captured"
            capture_all(graph_runner)
            assert sizes_for(graph_runner, make_server) == [1, 2, 4, 4, None]
