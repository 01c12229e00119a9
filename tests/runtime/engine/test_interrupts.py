"""Ctrl-C at any line, and errors at any depth of a step: what was asked ends, and the engine goes on."""

import contextlib
import threading
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lamina
from lamina import EngineError, Runtime, SamplingParams
from lamina.runtime.engine.output_processor import OutputProcessor
from lamina.runtime.scheduler.request_queue import RequestQueue
from lamina.runtime.startup import engine_builder
from lamina.runtime.worker.launched_step import LaunchedStep
from lamina.runtime.worker.model_runner import ModelRunner

from ..every_line import count, happening, raising, traced

PROMPTS = [[5], [7, 8, 9], [11] * 6]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
# A cache so small that requests wait and are preempted, so that an interrupt may hit that, too.
SMALL = {"block_size": 2, "num_kv_blocks": 10, "max_num_batched_tokens": 5, "compile": False}


def interrupt_at_line(place):
    """A trace function that presses Ctrl-C at the place-th line of the runtime's own code from now on."""
    return happening(raising(KeyboardInterrupt), place)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module", params=[1, 2], ids=["read at once", "read a step late"])
def runtime(request, tiny_text_folder):
    with (
        patch.dict(engine_builder.DEPTHS, cpu=request.param),
        Runtime.from_pretrained(tiny_text_folder, **SMALL) as runtime,
    ):
        yield runtime


@pytest.fixture(scope="module")
def right(runtime):
    return tokens(runtime.generate(PROMPTS, GREEDY))


@pytest.fixture(scope="module")
def num_lines(runtime):
    """Lines of the runtime's code that the three prompts take."""
    return count(lambda: runtime.generate(PROMPTS, GREEDY))


@given(place=st.floats(0, 1), is_streamed=st.booleans())
def test_an_interrupt_at_any_line_frees_every_block_and_changes_no_later_answer(
    runtime, right, num_lines, is_idle, place, is_streamed
):
    """Another stream is under way: it goes on with its own tokens."""
    bystander = runtime.stream([13], GREEDY)
    received = [next(bystander)]
    with (
        contextlib.suppress(KeyboardInterrupt),
        traced(interrupt_at_line(1 + int(place * num_lines))),
    ):
        if is_streamed:
            list(runtime.stream(PROMPTS[1], GREEDY))
        else:
            runtime.generate(PROMPTS, GREEDY)
    received += bystander
    whole = tokens(runtime.generate([[13]], GREEDY))[0]
    assert tuple(token for delta in received for token in delta.token_ids) == whole
    assert received[-1].finish_reason == "length"
    is_idle(runtime)
    runtime._loaded.core.scheduler.check()
    assert tokens(runtime.generate(PROMPTS, GREEDY)) == right


def test_a_queue_is_never_shorter_than_empty_wherever_an_interrupt_hits_it(make_server):
    request = make_server(blocks=4).add("a", 3)
    for line in range(1, 12):
        queue = RequestQueue()
        with contextlib.suppress(KeyboardInterrupt), traced(interrupt_at_line(line)):
            queue.append(request)
            queue.discard(request)
            queue.append(request)
        queue.discard(request)
        assert len(queue) == 0


@pytest.fixture
def failing_once(monkeypatch):
    """failing_once(owner, name, step, error): that method raises it the step-th time that it is called."""

    def make(owner, name, step, error):
        original, calls = getattr(owner, name), []

        def fail_once(*arguments):
            calls.append(None)
            if len(calls) == step:
                raise error("once")
            return original(*arguments)

        monkeypatch.setattr(owner, name, fail_once)

    return make


AT_MODEL = [(ModelRunner, "execute"), (LaunchedStep, "read")]


@pytest.mark.parametrize("where", AT_MODEL)
@pytest.mark.parametrize("step", [1, 2, 5])
def test_an_interrupt_at_the_model_ends_the_call_and_leaves_others_where_they_stood(
    runtime, right, is_idle, failing_once, where, step
):
    bystander = runtime.stream(PROMPTS[0], GREEDY)
    received = [next(bystander)]
    failing_once(*where, step, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt, match="once"):
        runtime.generate(PROMPTS[1:], GREEDY)
    received += bystander
    assert tuple(token for delta in received for token in delta.token_ids) == right[0]
    is_idle(runtime)
    assert tokens(runtime.generate(PROMPTS, GREEDY)) == right


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
@pytest.mark.parametrize("where", AT_MODEL)
@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_step_that_fails_once_at_the_model_is_computed_again_and_told(
    runtime, right, is_idle, failing_once, said, error, where, step
):
    failing_once(*where, step, error)
    assert tokens(runtime.generate(PROMPTS, GREEDY)) == right
    assert f"a step failed at no request in particular, and is tried again: {error.__name__}" in said()[-1]
    is_idle(runtime)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_model_that_fails_at_one_request_ends_that_one_and_no_other(runtime, is_idle, monkeypatch, victim):
    """The step holds all of them, and nothing in its error says which it was."""
    execute, params = ModelRunner.execute, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    right = tokens(runtime.generate(PROMPTS, params))

    def fail_at_victim(self, plan):
        ends = dict(
            zip(
                plan.request_ids, (plan.num_computed_tokens + plan.num_scheduled_tokens).tolist(), strict=True
            )
        )
        if ends.get(names[victim], 0) > len(PROMPTS[victim]) + 8:
            raise RuntimeError("odd")
        return execute(self, plan)

    streams = [runtime.stream(prompt, params) for prompt in PROMPTS]
    received = [[next(stream)] for stream in streams]
    names = [deltas[0].request_id for deltas in received]
    monkeypatch.setattr(ModelRunner, "execute", fail_at_victim)
    for number, stream in enumerate(streams):
        if number == victim:
            with pytest.raises(EngineError, match="which ends alone: RuntimeError"):
                received[number] += stream
        else:
            received[number] += stream
            assert tuple(t for delta in received[number] for t in delta.token_ids) == right[number]
    is_idle(runtime)
    monkeypatch.undo()
    assert tokens(runtime.generate(PROMPTS, params)) == right


def test_a_model_that_always_fails_fails_each_caller_and_nobody_hangs(runtime, right, is_idle, monkeypatch):
    def fail(self, plan):
        raise RuntimeError("always")

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "execute", fail)
        errors = []

        def ask():
            try:
                runtime.generate(PROMPTS, GREEDY)
            except EngineError as error:
                errors.append(str(error.__cause__))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert errors == ["always"] * 3
    is_idle(runtime)
    assert tokens(runtime.generate(PROMPTS, GREEDY)) == right


def test_threads_that_generate_at_once_get_their_own_tokens(runtime, right, is_idle):
    answers, streams = {}, {}

    def generate(number):
        answers[number] = [tokens(runtime.generate(PROMPTS, GREEDY)) for _ in range(3)]

    def stream(number):
        streams[number] = [list(runtime.stream(prompt, GREEDY)) for prompt in PROMPTS]

    threads = [threading.Thread(target=ask, args=(n,)) for n, ask in enumerate([generate, stream] * 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert list(answers.values()) == [[right] * 3] * 2
    for received in streams.values():
        assert [tuple(t for delta in deltas for t in delta.token_ids) for deltas in received] == right
    is_idle(runtime)


def test_closing_while_others_generate_ends_them_with_an_answer_or_a_clear_error(tiny_folder):
    endings = []
    runtime = Runtime.from_pretrained(tiny_folder, compile=False)
    started = threading.Barrier(3)

    def ask():
        started.wait()
        try:
            output = runtime.generate([[5]], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
            endings.append(output[0].outputs[0].finish_reason)
        except lamina.ClosedError:
            endings.append("closed")

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    started.wait()
    runtime.close()
    for thread in threads:
        thread.join(timeout=60)
    assert set(endings) <= {"abort", "closed", "length"}
    assert len(endings) == 2


def test_what_an_interrupted_close_leaves_is_closed_and_a_second_close_ends_it(tiny_folder, monkeypatch):
    runtime = Runtime.from_pretrained(tiny_folder, compile=False)
    stream = runtime.stream([5, 6], SamplingParams(max_tokens=8))
    next(stream)
    process = OutputProcessor.process

    def interrupted(self, outputs):
        monkeypatch.setattr(OutputProcessor, "process", process)
        raise KeyboardInterrupt

    monkeypatch.setattr(OutputProcessor, "process", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runtime.close()
    with pytest.raises(lamina.ClosedError):
        runtime.generate([[5]])
    runtime.close()
    assert [delta.finish_reason for delta in stream][-1] == "abort"
