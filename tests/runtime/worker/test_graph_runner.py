"""Captured steps: padding that may hold anything, sizes at every border, capture while idle, snapshots."""

import contextlib

import pytest
import torch

from lamina import CompileConfig, Runtime, SamplingParams
from lamina.runtime.worker.input_batch import InputBatch

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
