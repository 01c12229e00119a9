"""Two real engines answer as one does, share what begins alike, and outlive each other."""

import asyncio
import gc
import os
import signal
from contextlib import asynccontextmanager

import pytest

from lamina import (
    AsyncRuntime,
    BeamSearchParams,
    ConfigError,
    EngineDeadError,
    RequestError,
    Runtime,
    SamplingParams,
)
from lamina.runtime.engine import core_process

from ..engine.processes import SMALL, is_running, threads, until

PROMPTS = [f"hello world {number}" for number in range(6)]
ASKED = [
    SamplingParams(max_tokens=12, ignore_eos=True, **own)
    for own in (
        {"temperature": 0},
        {"temperature": 1.3, "seed": 7, "top_p": 0.9},
        {"temperature": 1.0},
        {"temperature": 1.0, "n": 3, "seed": 5, "logprobs": 2},
        {"temperature": 0, "stop": ["e"]},
        {"temperature": 0, "prompt_logprobs": 1},
    )
]
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def open_runtime(folder):
    return AsyncRuntime.from_pretrained(folder, engine="process", data_parallel=2, **SMALL)


@pytest.fixture(scope="module")
def shared(tiny_text_folder):
    """Two engines for event loops that come and go."""
    runtime = asyncio.run(open_runtime(tiny_text_folder))
    yield runtime
    asyncio.run(runtime.close())


def said(output):
    return output.prompt_token_ids, output.outputs, output.prompt_logprobs


@asynccontextmanager
async def held(runtime):
    """Inside, engines compute nothing: what is asked there is given out as if at once."""
    await runtime.sleep()
    try:
        yield
    finally:
        await runtime.wake()


def processes(runtime):
    """The processes of its engines, by number."""
    members = runtime._client._handle._engines._members
    return [members[number].core.pid for number in sorted(members)]


def test_answers_are_those_of_one_engine(shared, tiny_text_folder):
    beams = BeamSearchParams(beam_width=2, max_tokens=4)

    async def answers():
        async with held(shared):
            generations = [shared.generate(*each) for each in zip(PROMPTS, ASKED, strict=True)]
        found = [said(await generation.output()) for generation in generations]
        return found, (await shared.beam_search("hello", beams)).outputs, {g.engine for g in generations}

    found, beamed, engines = asyncio.run(answers())
    assert engines == {0, 1}
    with Runtime.from_pretrained(tiny_text_folder, **SMALL) as runtime:
        assert [said(output) for output in runtime.generate(PROMPTS, ASKED)] == found
        assert runtime.beam_search(["hello"], beams)[0].outputs == beamed


def test_what_begins_alike_meets_its_blocks_and_what_does_not_is_spread(shared):
    async def body():
        async with held(shared):
            first = [shared.generate([20 + number] * 40, SHORT) for number in range(6)]
        await asyncio.gather(*(generation.output() for generation in first))
        assert sorted(generation.engine for generation in first) == [0, 0, 0, 1, 1, 1]
        before = await shared.stats()
        again = [shared.generate([20 + number] * 40 + [5, 6], SHORT) for number in range(6)]
        outputs = await asyncio.gather(*(generation.output() for generation in again))
        assert [generation.engine for generation in again] == [generation.engine for generation in first]
        assert [output.num_cached_tokens for output in outputs] == [32] * 6
        salted = shared.generate([20] * 40 + [5, 6], SHORT, cache_salt="another")
        assert (await salted.output()).num_cached_tokens == 0
        after = await shared.stats()
        hits = [stats["prefix_cache"]["hit_tokens"] for stats in (before, after)]
        assert hits[1] - hits[0] == 6 * 32
        of_each = after["engines"].values()
        assert sum(stats["prefix_cache"]["hit_tokens"] for stats in of_each) == hits[1]
        assert (await shared.stats(engine=1))["prefix_cache"] == after["engines"]["1"]["prefix_cache"]

    asyncio.run(body())


def test_a_drained_engine_finishes_its_streams_and_gets_no_others(shared):
    async def body():
        async with held(shared):
            running = [shared.generate([30 + number] * 3, LONG) for number in range(4)]
            drained = running[1].engine
            shared.drain_engine(drained)
            assert shared.engines()[drained].state == "draining"
            with pytest.raises(RequestError, match="the last that takes requests"):
                shared.drain_engine(1 - drained)
            later = [shared.generate([40 + number] * 3, SHORT) for number in range(4)]
            assert {generation.engine for generation in later} == {1 - drained}
        outputs = await asyncio.gather(*(generation.output() for generation in (*running, *later)))
        assert [len(output.outputs[0].token_ids) for output in outputs] == [200] * 4 + [4] * 4
        assert shared.engines()[drained].state == "drained"
        shared.resume_engine(drained)
        assert [engine.state for engine in shared.engines()] == ["serving"] * 2
        async with held(shared):
            again = [shared.generate([50 + number] * 3, SHORT) for number in range(2)]
        assert {generation.engine for generation in again} == {0, 1}
        await asyncio.gather(*(generation.output() for generation in again))

    asyncio.run(body())


def test_abort_and_sleep_reach_all(shared):
    async def body():
        async with held(shared):
            begun = [shared.generate([60 + number] * 3, LONG, request_id="same") for number in range(4)]
            assert {generation.engine for generation in begun} == {0, 1}
            assert await shared.abort("same")
            for generation in begun:
                assert (await generation.output()).outputs[0].finish_reason == "abort"
            assert await shared.is_sleeping()
            await until(lambda: all(engine.health.status.is_asleep for engine in shared.engines()))
            of_each = (await shared.stats())["engines"].values()
            assert [stats["requests"]["finished"] > 0 for stats in of_each] == [True, True]
        assert not await shared.is_sleeping()

    asyncio.run(body())


@pytest.mark.long  # three engines are started
def test_a_killed_engine_ends_its_requests_alone_and_comes_back_with_the_others_weights(
    tiny_text_folder, make_tiny_folder, own_temp, monkeypatch
):
    monkeypatch.setattr(core_process, "SILENT_SECONDS", 600.0)  # one that is stopped is given requests
    folder = make_tiny_folder(seed=3)
    with Runtime.from_pretrained(folder, **SMALL) as runtime:
        expected = [output.outputs[0].token_ids for output in runtime.generate([[9, 8, 7], [3, 2]], SHORT)]

    async def outlived():
        runtime = await open_runtime(tiny_text_folder)
        await runtime.update_weights(folder)
        pids = processes(runtime)
        for pid in pids:  # so that nothing ends before the one is killed
            os.kill(pid, signal.SIGSTOP)
        begun = [runtime.generate([5 + number] * 3, LONG) for number in range(6)]
        assert [generation.engine for generation in begun] == [0, 1] * 3
        os.kill(pids[1], signal.SIGKILL)
        os.kill(pids[0], signal.SIGCONT)
        for generation in begun[1::2]:
            with pytest.raises(
                EngineDeadError, match=f"engine 1 is lost: its process {pids[1]} was ended by"
            ):
                await generation.output()
        for generation in begun[::2]:
            assert len((await generation.output()).outputs[0].token_ids) == 200
        assert runtime.health().ok
        await until(lambda: runtime.engines()[1].takes_requests, 240)
        assert processes(runtime)[1] != pids[1]
        pair = [runtime.generate(prompt, SHORT) for prompt in ([9, 8, 7], [3, 2])]
        assert {generation.engine for generation in pair} == {0, 1}
        assert [(await generation.output()).outputs[0].token_ids for generation in pair] == expected
        return processes(runtime)

    before = threads()

    async def body():
        pids = await outlived()  # and nobody holds the runtime
        await until(lambda: gc.collect() >= 0 and not any(map(is_running, pids)))
        await until(lambda: threads() <= before)

    asyncio.run(body())


def test_what_no_engine_can_load_is_the_error_of_loading(tmp_path):
    with pytest.raises(ConfigError, match="device is 'cuda:0' and data_parallel 2"):
        asyncio.run(
            AsyncRuntime.from_pretrained(tmp_path, engine="process", data_parallel=2, device="cuda:0")
        )
