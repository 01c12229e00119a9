"""An AsyncRuntime comes and goes: loading given up, loops that end, runtimes closed, dropped or left open."""

import asyncio
import gc
import subprocess
import sys

import pytest

from lamina import (
    AsyncRuntime,
    ClosedError,
    ConfigError,
    LoadError,
    RequestError,
    SamplingParams,
    UnsupportedError,
)

from ..engine_gate import held
from .asking import LONG, SHORT, SMALL, assert_ended, assert_idle, core_threads, iterate, tokens_of


@pytest.fixture
def new_threads():
    """new_threads() -> threads of engines that began in this test and live."""
    before = core_threads()
    return lambda: core_threads() - before


def test_a_runtime_serves_one_event_loop_at_a_time(shared):
    async def ask():
        return tokens_of(await iterate(shared.generate("hello", SHORT)))

    first = asyncio.run(ask())
    with pytest.raises(RequestError, match="no event loop runs"):
        shared.generate("hello")

    async def nested():
        assert await ask() == first
        with pytest.raises(RequestError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, ask())

    asyncio.run(nested())


def test_what_a_closed_event_loop_leaves_behind_ends(shared):
    async def leave():
        generation = shared.generate("hello", LONG)
        engine.let(1)
        await generation.read()
        return generation

    with held(shared) as engine:
        left = [asyncio.run(leave()) for _ in range(2)]

    async def look():
        await assert_idle(shared)
        assert [each.num_output_tokens < 200 for each in left] == [True, True]

    asyncio.run(look())


def test_a_loop_closed_while_a_task_waits_does_not_disturb_the_next(shared):
    loop = asyncio.new_event_loop()

    async def begin():
        generation = shared.generate("hello", LONG)
        await generation.read()
        return asyncio.ensure_future(generation.output())

    waiting = loop.run_until_complete(begin())
    loop.close()  # with a task in it, which nobody has cancelled

    async def look():
        answer = await shared.generate("hello", SHORT).output()
        await assert_idle(shared)
        return answer

    assert len(asyncio.run(look()).outputs[0].token_ids) == 12
    waiting._log_destroy_pending = False
    assert not waiting.done()


def test_one_wakeup_a_step_whoever_reads(serve, monkeypatch):
    async def body(runtime):
        loop, num_wakeups = asyncio.get_running_loop(), 0
        real = loop.call_soon_threadsafe

        def counted(*args, **kwargs):
            nonlocal num_wakeups
            num_wakeups += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        before = runtime.health().status.num_steps
        asked = [
            runtime.generate([each], SamplingParams(max_tokens=20, ignore_eos=True)) for each in range(6)
        ]
        await asyncio.gather(*(iterate(each) for each in asked))
        return num_wakeups, runtime.health().status.num_steps - before

    num_wakeups, num_steps = serve(body)
    assert num_wakeups <= num_steps + 1 < 60


@pytest.mark.parametrize(
    "model, settings, error",
    [
        ("/nowhere", {}, LoadError),
        (None, {"max_num_seqs": 0}, ConfigError),
        (None, {"no_such_setting": 1}, ConfigError),
        (None, {"engine": "elsewhere"}, ConfigError),
    ],
)
def test_what_cannot_be_loaded_raises_and_leaves_no_thread(tiny_folder, model, settings, error, new_threads):
    with pytest.raises(error):
        asyncio.run(AsyncRuntime.from_pretrained(model or tiny_folder, **{"compile": False} | settings))
    assert not new_threads()


def test_to_cancel_the_loading_gives_it_up(tiny_text_folder, new_threads):
    async def main():
        begun = asyncio.Event()
        task = asyncio.create_task(
            AsyncRuntime.from_pretrained(tiny_text_folder, progress=lambda *_: begun.set(), **SMALL)
        )
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not new_threads()


def test_to_close_ends_what_runs_and_refuses_what_comes(tiny_text_folder, new_threads):
    async def main():
        async with await AsyncRuntime.from_pretrained(tiny_text_folder, **SMALL) as runtime:
            generation = runtime.generate("hello", LONG)
            reader = asyncio.create_task(iterate(generation))
            with held(runtime) as engine:
                engine.begin(1)
                await runtime.close()
        assert (await reader)[-1].finish_reason == "abort"
        assert not runtime.health().ok
        assert "closed" in runtime.health().reason
        for use in (
            lambda: _result_of(lambda: runtime.generate("hello")),
            runtime.stats,
            lambda: runtime.call("suspend"),
        ):
            with pytest.raises(ClosedError):
                await use()
        assert not await runtime.abort("hello")
        await runtime.close()

    asyncio.run(main())
    assert not new_threads()


async def _result_of(call):
    return call()


def test_a_runtime_that_is_dropped_ends_its_thread(tiny_text_folder, new_threads):
    async def main():
        runtime = await AsyncRuntime.from_pretrained(tiny_text_folder, **SMALL)
        generation = runtime.generate("hello", LONG)
        del runtime
        whole = await generation.output()
        assert len(whole.outputs[0].token_ids) == 200, "a generation holds its runtime"
        return new_threads()

    threads = asyncio.run(main())
    gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_methods_of_the_engine_are_called_by_name(serve):
    async def body(runtime):
        assert "runs eagerly" in await runtime.call("explain")
        generation = runtime.generate("hello", LONG)
        with held(runtime) as engine:
            engine.begin(1)
            await generation.read()
            with pytest.raises(RequestError, match="while requests are live"):
                await runtime.call("suspend")
            await generation.aclose()
        await assert_ended(runtime)
        await runtime.call("suspend")
        await runtime.call("resume")
        with pytest.raises(UnsupportedError, match="method is 'close'; wanted one of"):
            await runtime.call("close")
        return await runtime.generate("hello", SHORT).output()

    assert len(serve(body).outputs[0].token_ids) == 12


def test_garbage_is_frozen_and_seldom_looked_for_until_the_end(tiny_text_folder):
    before = gc.get_threshold()

    async def main():
        async with await AsyncRuntime.from_pretrained(tiny_text_folder, **SMALL) as runtime:
            for _ in range(2):
                runtime.freeze_garbage()
            assert gc.get_freeze_count() > 1000
            assert gc.get_threshold()[0] > 10 * before[0]

    asyncio.run(main())
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before


UNCLOSED = """
import asyncio, sys
from lamina import AsyncRuntime, SamplingParams

async def main():
    runtime = await AsyncRuntime.from_pretrained(sys.argv[1], compile=False, device="cpu")
    generation = runtime.generate("hello", SamplingParams(max_tokens=200, ignore_eos=True))
    await generation.read()
    print("read", flush=True)
    return runtime, generation

kept = asyncio.run(main())
"""


def test_a_program_that_never_closes_its_runtime_ends_all_the_same(tiny_text_folder):
    command = [sys.executable, "-c", UNCLOSED, str(tiny_text_folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr
