"""A core in a process of its own answers as one in a thread does, and whatever ends either leaves nothing."""

import asyncio
import gc
import os
import signal
from dataclasses import replace

import pytest

from lamina import AsyncRuntime, ClosedError, EngineDeadError, Runtime, SamplingParams, UnsupportedError
from lamina.common.errors import WireError
from lamina.runtime.engine import core_process

from .processes import SHORT, SMALL, handle_of, is_running, open_runtime, threads, until, wait_until

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
ASKED = {
    "greedy": {},
    "seeded": {"temperature": 1.3, "seed": 7, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "many": {"n": 3, "temperature": 1.0, "seed": 5, "logprobs": 1},
    "best": {"n": 1, "best_of": 3, "temperature": 1.0, "seed": 5},
    "adjusted": {
        "logit_bias": {40: 9.0, 50: -100.0},
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "bad_words": ["hello", [41]],
        "allowed_token_ids": list(range(4, 260)),
    },
    "stopped": {"stop": ["e", "\ufffd"], "include_stop_str_in_output": True},
    "stop ids": {"stop_token_ids": list(range(100, 200)), "min_tokens": 3},
    "ids alone": {"detokenize": False},
}


@pytest.fixture(scope="module")
def shared(tiny_text_folder):
    """One process for event loops that come and go."""
    runtime = asyncio.run(open_runtime(tiny_text_folder))
    yield runtime
    asyncio.run(runtime.close())


def words(output):
    """All of an answer but who asked and when, and its figures."""
    ways = [replace(way, logprobs=None, cumulative_logprob=None) for way in output.outputs]
    return output.prompt_token_ids, ways


def figures(output):
    """The log-probabilities of an answer, whose last digits depend on the other rows of its steps."""
    own = [place for way in output.outputs for place in way.logprobs or ()]
    own += [place for place in output.prompt_logprobs or () if place is not None]
    return [one.logprob for place in own for one in place.values()]


def assert_same(one, other, name=None):
    assert words(one) == words(other), name
    assert figures(one) == pytest.approx(figures(other), abs=1e-4), name


def test_answers_are_those_of_a_thread_and_of_a_blocking_runtime(shared, tiny_text_folder):
    asked = [SamplingParams(max_tokens=16, **{"temperature": 0.0} | own) for own in ASKED.values()]
    prompts = [f"hello world {number}" for number in range(len(asked))]

    async def answers(runtime):
        generations = [runtime.generate(*each) for each in zip(prompts, asked, strict=True)]
        return [await generation.output() for generation in generations]

    async def threaded():
        async with await AsyncRuntime.from_pretrained(tiny_text_folder, **SMALL) as runtime:
            return await answers(runtime)

    found = asyncio.run(answers(shared))
    with Runtime.from_pretrained(tiny_text_folder, **SMALL) as runtime:
        blocking = runtime.generate(prompts, asked)
    for name, own, of_thread, of_blocking in zip(
        ASKED, found, asyncio.run(threaded()), blocking, strict=True
    ):
        assert_same(own, of_thread, name)
        assert_same(own, of_blocking, name)


def test_an_end_of_file_that_is_not_the_sockets_is_the_error_of_loading(tiny_text_folder, monkeypatch):
    def read(folder, override):
        raise EOFError("Ran out of input")

    monkeypatch.setattr(core_process, "load_tokenizer", read)
    with pytest.raises(EOFError, match="Ran out of input"):
        asyncio.run(open_runtime(tiny_text_folder))


def test_pieces_come_as_they_are_written(shared):
    async def body():
        generation = shared.generate("hello", SHORT)
        deltas = [delta async for delta in generation]
        whole = await shared.generate("hello", SHORT).output()
        assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
        assert sum((delta.token_ids for delta in deltas), ()) == whole.outputs[0].token_ids

    asyncio.run(body())


def test_figures_and_calls_cross_and_what_there_is_not_is_refused(shared):
    async def body():
        figures = await shared.stats()
        assert figures["blocks"]["total"] == SMALL["num_kv_blocks"] - 1
        assert figures["resolved"] == shared.description.settings
        assert "eagerly" in await shared.call("explain")
        with pytest.raises(UnsupportedError, match="'reboot'"):
            await shared.call("reboot")
        with pytest.raises(WireError, match="Call"):
            await shared.call("stats", object())

    asyncio.run(body())


def test_logits_processors_are_refused_by_name_and_nothing_is_queued(shared):
    async def body():
        params = SamplingParams(logits_processors=[lambda prompt, answer, logits: logits])
        with pytest.raises(UnsupportedError, match="logits_processors"):
            shared.generate("hello", params)
        assert (await shared.stats())["requests"]["waiting"] == 0

    asyncio.run(body())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_for_the_process_that_serves_do_not_end_the_engine(shared, number):
    async def body():
        before = await shared.generate("hello", SHORT).output()
        os.kill(handle_of(shared).pid, number)
        after = await shared.generate("hello", SHORT).output()
        assert_same(after, before)

    assert os.getsid(handle_of(shared).pid) != os.getsid(0)
    asyncio.run(body())


def test_an_engine_that_stands_still_is_not_healthy_until_it_goes_on(shared):
    async def body():
        pid = handle_of(shared).pid
        await until(lambda: shared.health().ok)
        os.kill(pid, signal.SIGSTOP)
        try:
            await until(lambda: not shared.health().ok)
            assert f"{pid} has said nothing for" in shared.health().reason
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: shared.health().ok)
        await shared.generate("hello", SHORT).output()

    asyncio.run(body())


def test_every_answer_ends_by_an_error_when_the_engine_is_killed(tiny_text_folder, own_temp):
    async def body():
        runtime = await open_runtime(tiny_text_folder)
        assert list(own_temp.iterdir()) == []  # the sockets are nowhere to be found
        pid = handle_of(runtime).pid
        begun = [runtime.generate(f"hello {number}", LONG) for number in range(12)]
        await begun[0].read()
        os.kill(pid, signal.SIGSTOP)  # what comes now cannot be answered before the end
        late = [runtime.generate(f"hello {number}", LONG) for number in range(12)]
        reading = [asyncio.create_task(generation.output()) for generation in (*begun, *late)]
        calling = asyncio.create_task(runtime.call("stats"))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        found = await asyncio.wait_for(asyncio.gather(*reading, calling, return_exceptions=True), 120)
        assert all("SIGKILL" in str(each) for each in found if isinstance(each, Exception))
        assert all(isinstance(each, EngineDeadError) for each in found[len(begun) :]), found
        assert "SIGKILL" in runtime.health().reason
        assert not runtime.health().ok
        with pytest.raises(EngineDeadError, match=f"its process {pid} was ended by SIGKILL"):
            runtime.generate("hello")
        assert not is_running(pid)
        await runtime.close()
        await runtime.close()

    asyncio.run(body())


def test_an_engine_that_hangs_is_ended_by_force_on_closing(tiny_text_folder, own_temp):
    async def body():
        runtime = await open_runtime(tiny_text_folder)
        pid = handle_of(runtime).pid
        os.kill(pid, signal.SIGSTOP)
        generation = runtime.generate("hello", LONG)
        await runtime.close(timeout=0.2)
        assert not is_running(pid)
        with pytest.raises((EngineDeadError, ClosedError)):
            await generation.output()

    asyncio.run(body())


def test_a_runtime_that_is_dropped_ends_its_process(tiny_text_folder, own_temp):
    async def body():
        runtime = await open_runtime(tiny_text_folder)
        pid = handle_of(runtime).pid
        await runtime.generate("hello", SHORT).output()
        del runtime
        await until(lambda: gc.collect() >= 0 and not is_running(pid))

    before = threads()
    asyncio.run(body())
    wait_until(lambda: threads() <= before)
