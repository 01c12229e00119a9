"""Interrupts, errors and collections at every line and call of a step, an arrival, an end and a close."""

import contextlib
import dataclasses
import gc
import sys
import threading
import time
from functools import partial
from unittest.mock import patch

import pytest
from hypothesis import settings

from lamina import LaminaError, Runtime, SamplingParams
from lamina.runtime.scheduler.scheduler import Scheduler
from lamina.runtime.startup import engine_builder
from lamina.runtime.tokenization.detokenizer import IncrementalDetokenizer

from ..every_line import count, happening, raising, traced

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
# What a step can be asked for, all of it: every kind has lines of its own.
RICH = SamplingParams(
    temperature=0,
    max_tokens=5,
    ignore_eos=True,
    stop="zz",
    logprobs=2,
    prompt_logprobs=1,
    presence_penalty=0.5,
    min_tokens=2,
    logits_processors=[lambda prompt, answer, logits: logits],
)
UNDER_WAY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
CANARY, VICTIM = [5, 6, 7], [11] * 7
SMALL = {"block_size": 2, "num_kv_blocks": 24, "max_num_batched_tokens": 5, "compile": False}


def places(total, most=40):
    """Every line where proving, else some of them, spread over all."""
    step = 1 if settings.default.max_examples > 100 else max(1, total // most)
    return range(1 + total % step, total + 1, step)


def token_ids(deltas):
    return tuple(token for delta in deltas for token in delta.token_ids)


@pytest.fixture(scope="module", params=[1, 2], ids=["read at once", "read a step late"])
def runtime(request, tiny_text_folder):
    with (
        patch.dict(engine_builder.DEPTHS, cpu=request.param),
        Runtime.from_pretrained(tiny_text_folder, **SMALL) as runtime,
    ):
        yield runtime


@pytest.fixture(scope="module")
def alone(runtime):
    """The canary's tokens where there is nobody else."""
    return runtime.generate([CANARY], GREEDY)[0].outputs[0].token_ids


def begun(runtime, prompt, params):
    """A stream that has its first token, and the deltas read of it."""
    stream = runtime.stream(prompt, params)
    return stream, [next(stream)]


def steps(runtime, number):
    for _ in range(number):
        runtime._client.step()


def arrive(runtime, victims):
    victims.append(runtime.stream(VICTIM, RICH))
    next(victims[-1])


def leave(runtime, victims):
    """A stream is closed, and whoever comes next ends its request."""
    victims.pop().close()
    runtime.stats()


# What is interrupted: how it is prepared, and what happens then.
ACTIONS = {
    "step": lambda runtime, victims: partial(steps, runtime, 2),
    "add": lambda runtime, victims: partial(arrive, runtime, victims),
    "abort": lambda runtime, victims: partial(leave, runtime, victims),
}


def prepared(runtime, kind):
    """A canary under way, two victims, and what is to be interrupted."""
    canary = begun(runtime, CANARY, GREEDY)
    victims = [begun(runtime, VICTIM, RICH)[0] for _ in range(2)]
    return canary, victims, ACTIONS[kind](runtime, victims)


def assert_unharmed(runtime, canary, alone):
    stream, received = canary
    assert token_ids([*received, *stream]) == alone


@pytest.fixture
def is_sound(runtime, is_idle, alone):
    """Nobody is live, no block is held, the books add up, and the next answer is right."""

    def check():
        is_idle(runtime)
        runtime._loaded.core.scheduler.check()
        assert not runtime._loaded.core._live
        assert not runtime._loaded.core._executor.model_runner._adjuster.processors
        assert not runtime._client._processor._answers

    yield check
    check()
    assert runtime.generate([CANARY], GREEDY)[0].outputs[0].token_ids == alone


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("kind", ACTIONS)
def test_an_error_at_any_line_harms_nobody_else_and_keeps_no_block(runtime, alone, is_sound, kind, error):
    canary, victims, action = prepared(runtime, kind)
    total = count(action)
    victims.clear()
    assert_unharmed(runtime, canary, alone)
    is_sound()
    for place in places(total):
        canary, victims, action = prepared(runtime, kind)
        with contextlib.suppress(error, LaminaError), traced(happening(raising(error), place)):
            action()
        victims.clear()
        assert_unharmed(runtime, canary, alone)
        is_sound()


@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:Exception ignored in")  # a generator that dies unread is entered for it
def test_an_error_at_any_call_of_a_step_ends_at_most_the_request_that_it_is_of(runtime, alone, is_sound):
    """Nothing comes out of the step: who asked is told, and where nothing says who it was, it goes on."""
    canary, victims, _ = prepared(runtime, "step")
    total = count(partial(runtime._client.enter, lambda core: core.step()), "call")
    victims.clear()
    assert_unharmed(runtime, canary, alone)

    def broken_step(place, core):
        with traced(happening(raising(RuntimeError), place, "call")):
            core.step()

    for place in places(total - 1):
        canary, victims, _ = prepared(runtime, "step")
        runtime._client.enter(partial(broken_step, 1 + place))  # the first call is the step itself
        for victim in victims:
            with contextlib.suppress(LaminaError):
                list(victim)
        assert_unharmed(runtime, canary, alone)
        is_sound()


@pytest.mark.timeout(3600)
def test_an_interrupt_at_any_line_of_a_step_loses_nothing_of_a_stream_under_way(runtime, is_sound):
    """Whatever is processed twice comes out once: tokens, text, log-probabilities and the stop string."""

    def parts(deltas):
        return [(d.token_ids, d.text, d.finish_reason, [*map(list, d.logprobs)]) for d in deltas]

    plain = list(runtime.stream(CANARY, UNDER_WAY))
    stop = "".join(delta.text for delta in plain[4:7])
    stopped = dataclasses.replace(UNDER_WAY, stop=stop, include_stop_str_in_output=True, max_tokens=20)
    for params in (UNDER_WAY, stopped):
        right = parts(runtime.stream(CANARY, params))
        stream, _ = begun(runtime, CANARY, params)
        total = count(partial(steps, runtime, 9))
        del stream
        for place in places(total):
            stream, received = begun(runtime, CANARY, params)
            with (
                contextlib.suppress(KeyboardInterrupt),
                traced(happening(raising(KeyboardInterrupt), place)),
            ):
                steps(runtime, 9)
            assert parts([*received, *stream]) == right
            is_sound()


def test_a_collection_of_streams_at_any_line_of_an_abort_ends_them_and_nobody_else(runtime, alone, is_sound):
    def dropped_in_a_cycle():
        cycle = [begun(runtime, [13, 14], GREEDY)[0]]
        cycle.append(cycle)

    _, victims, action = prepared(runtime, "abort")
    total = count(action)
    victims.clear()
    gc.collect()
    gc.disable()
    gc.freeze()  # what there is now takes long to be looked through
    try:
        for place in places(total):
            canary, victims, action = prepared(runtime, "abort")
            dropped_in_a_cycle()
            with traced(happening(gc.collect, place)):
                action()
            victims.clear()
            assert_unharmed(runtime, canary, alone)
            is_sound()
    finally:
        gc.unfreeze()
        gc.enable()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_close_interrupted_at_any_line_can_be_closed_again(tiny_text_folder, error):
    def opened():
        runtime = Runtime.from_pretrained(tiny_text_folder, **SMALL)
        return runtime, [begun(runtime, prompt, GREEDY)[0] for prompt in (CANARY, VICTIM)]

    runtime, streams = opened()
    total = count(runtime.close)
    for place in places(total, 12):
        runtime, streams = opened()
        engine = runtime._loaded.core
        with contextlib.suppress(error), traced(happening(raising(error), place)):
            runtime.close()
        runtime.close()
        assert engine.scheduler._kv_cache.pool.num_used == 0
        for stream in streams:
            with contextlib.suppress(LaminaError):
                assert [delta.finish_reason for delta in stream][-1:] in ([], ["abort"])


@pytest.mark.parametrize("where", [(Scheduler, "update"), (IncrementalDetokenizer, "append")], ids=str)
def test_threads_that_switch_between_an_end_and_its_text_lose_neither(runtime, monkeypatch, is_idle, where):
    """Another thread sees a request that has ended before its last text is there, and waits for it."""
    owner, name = where
    original = getattr(owner, name)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    right = [runtime.generate([[seed]], params)[0].outputs[0] for seed in range(6)]

    def slow(*arguments):
        result = original(*arguments)
        time.sleep(0.002)
        return result

    monkeypatch.setattr(owner, name, slow)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    streamed, whole = {}, {}

    def stream(seed):
        streamed[seed] = [list(runtime.stream([seed], params)) for _ in range(3)]

    def generate(seed):
        whole[seed] = [runtime.generate([[seed]], params)[0].outputs[0] for _ in range(3)]

    try:
        asks = [threading.Thread(target=ask, args=(seed,)) for seed in range(6) for ask in (stream, generate)]
        for thread in asks:
            thread.start()
        for thread in asks:
            thread.join(timeout=200)
    finally:
        sys.setswitchinterval(before)
    for seed, answer in enumerate(right):
        for deltas in streamed[seed]:
            assert [delta.finish_reason for delta in deltas] == [None, None, None, "length"]
            assert ("".join(delta.text for delta in deltas), token_ids(deltas)) == (
                answer.text,
                answer.token_ids,
            )
        assert [(given.text, given.token_ids) for given in whole[seed]] == [
            (answer.text, answer.token_ids)
        ] * 3
    is_idle(runtime)
