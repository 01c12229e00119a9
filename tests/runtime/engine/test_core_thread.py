"""Faults of one request leave the others alone; a core that is lost says so everywhere; health is true."""

import asyncio
import threading
import time

import pytest

from lamina import (
    AsyncRuntime,
    EngineDeadError,
    EngineError,
    KernelBuildError,
    ProcessorError,
    RequestError,
    SamplingParams,
)
from lamina.custom_ops._shared.ledger import before_build
from lamina.runtime.engine.engine_core import EngineCore
from lamina.runtime.protocol.core_messages import AddRequests, Call, StepOutputs
from lamina.runtime.protocol.engine_request import EngineRequest
from lamina.runtime.protocol.interrupts import InterruptAtRequestError

from ...engine_gate import LIMIT, held

SMALL = {"compile": False, "device": "cpu", "num_kv_blocks": 96, "max_num_seqs": 6}
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def serve(tiny_text_folder):
    """serve(coroutine function, **settings) -> what it returns for a runtime of its own."""

    def run(body, **settings):
        async def main():
            async with await AsyncRuntime.from_pretrained(tiny_text_folder, **SMALL | settings) as runtime:
                return await asyncio.wait_for(body(runtime), 200)

        return asyncio.run(main())

    return run


async def ids_of(generation):
    return (await generation.output()).outputs[0].token_ids


def failing(at, error):
    def process(prompt_ids, token_ids, logits):
        if len(token_ids) == at:
            raise error
        return logits

    return SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logits_processors=[process])


@pytest.mark.parametrize(
    "error, raised",
    [
        (ValueError("mine"), ProcessorError),
        (KeyboardInterrupt(), ProcessorError),
        (MemoryError(), ProcessorError),
    ],
)
def test_a_processor_that_fails_ends_its_own_answer_after_its_tokens(serve, error, raised):
    async def body(runtime):
        right = await ids_of(runtime.generate("hello", SHORT))
        others = [runtime.generate("hello", SHORT) for _ in range(3)]
        ill = runtime.generate("hello", failing(4, error))
        read = []
        with pytest.raises(raised):
            await read_all(ill, read)
        for use in (ill.read, ill.output, ill.__anext__):
            with pytest.raises(raised):
                await use()
        assert read == list(right[:4])
        assert [await ids_of(other) for other in others] == [right] * 3
        assert runtime.health().ok

    serve(body)


def test_an_error_of_one_of_several_answers_ends_them_all(serve):
    async def body(runtime):
        ill = runtime.generate("hello", failing(4, ValueError()).with_seed(1))
        two = runtime.generate(
            "hello", SamplingParams(n=2, seed=1, max_tokens=90, logits_processors=[_at_second()])
        )
        for each in (ill, two):
            with pytest.raises(ProcessorError):
                await each.output()
        stats = await runtime.stats()
        assert stats["requests"]["running"] == stats["blocks"]["used"] == 0

    serve(body)


def _at_second():
    calls = iter(range(100))

    def process(prompt_ids, token_ids, logits):
        if next(calls) == 5:
            raise ValueError("the sixth call")
        return logits

    return process


def test_a_step_that_fails_at_one_request_ends_that_one(serve, monkeypatch):
    async def body(runtime):
        right = await ids_of(runtime.generate("hello", SHORT))
        monkeypatch.setattr(EngineCore, "_launch", launch_without_77(EngineCore._launch))
        well = [runtime.generate("hello", SHORT) for _ in range(3)]
        with pytest.raises(EngineError, match="a kernel fell over"):
            await runtime.generate([77], SHORT).output()
        assert [await ids_of(each) for each in well] == [right] * 3
        assert runtime.health().ok

    serve(body)


def launch_without_77(real):
    def launch(core, plan):
        ill = [name for name, live in core._live.items() if live.request.prompt_token_ids == (77,)]
        if any(name in plan.request_ids for name in ill):
            raise RuntimeError("a kernel fell over")
        real(core, plan)

    return launch


def test_a_core_that_is_lost_raises_everywhere_and_its_health_says_why(serve, monkeypatch):
    real, at = EngineCore.step, []

    def step(core):
        at.append(1)
        if len(at) == 6:
            raise SystemError("the loop itself fell over")
        real(core)

    async def body(runtime):
        heard = Listener()
        runtime.listen(heard)
        monkeypatch.setattr(EngineCore, "step", step)
        asked = [runtime.generate("hello", LONG) for _ in range(3)]
        waiting = [asyncio.create_task(each.output()) for each in asked]
        for each in waiting:
            with pytest.raises(EngineDeadError, match="the loop itself fell over"):
                await each
        for use in (runtime.stats, asked[0].output, lambda: read_all(asked[0])):
            with pytest.raises(EngineDeadError):
                await use()
        with pytest.raises(EngineDeadError):
            runtime.generate("hello")
        assert not await runtime.abort("x")
        health = runtime.health()
        assert not health.ok
        assert not health.status.is_alive
        assert "the loop itself fell over" in health.reason
        assert len(heard.ends) == 3
        assert all(isinstance(end.error, EngineDeadError) for end in heard.ends)

    serve(body)


async def read_all(generation, ids=None):
    while deltas := await generation.read():
        for delta in deltas:
            (ids if ids is not None else []).extend(delta.token_ids)


def test_calls_that_wait_when_the_core_is_lost_raise_too(serve, monkeypatch):
    inside, go_on = threading.Event(), threading.Event()

    def step(core):
        inside.set()
        go_on.wait(LIMIT)
        raise SystemError("fell over")

    async def body(runtime):
        monkeypatch.setattr(EngineCore, "step", step)
        generation = runtime.generate("hello", LONG)
        await asyncio.to_thread(inside.wait, LIMIT)
        call = asyncio.create_task(runtime.stats())
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(EngineDeadError):
            await call
        with pytest.raises(EngineDeadError):
            await generation.output()

    serve(body)


def holding(inside, go_on, builds=False):
    def process(prompt_ids, token_ids, logits):
        if not token_ids:
            if builds:
                before_build("a kernel of the test's")
            inside.set()
            go_on.wait(LIMIT)
        return logits

    return SamplingParams(max_tokens=4, logits_processors=[process])


@pytest.mark.parametrize("builds", [False, True])
def test_a_step_that_hangs_is_no_health_unless_something_is_built_in_it(serve, builds):
    inside, go_on = threading.Event(), threading.Event()

    async def body(runtime):
        generation = runtime.generate("hello", holding(inside, go_on, builds))
        await asyncio.to_thread(inside.wait, LIMIT)
        while (runtime.health().status.step_seconds or 0.0) <= 0.05:
            await asyncio.sleep(0.01)
        health = runtime.health()
        go_on.set()
        await generation.output()
        assert runtime.health().ok
        return health

    health = serve(body, step_timeout=0.05)
    assert health.ok is builds
    assert health.status.is_alive
    if builds:
        assert health.status.building == "a kernel of the test's"
    else:
        assert "a step has been running for" in health.reason


def test_to_close_a_runtime_whose_step_hangs_leaves_the_thread_behind_and_raises(tiny_text_folder):
    before = set(threading.enumerate())
    inside, go_on = threading.Event(), threading.Event()

    async def main():
        runtime = await AsyncRuntime.from_pretrained(tiny_text_folder, **SMALL)
        generation = runtime.generate("hello", holding(inside, go_on))
        reader = asyncio.create_task(generation.output())
        await asyncio.to_thread(inside.wait, LIMIT)
        await runtime.close(timeout=0.05)
        with pytest.raises(EngineDeadError, match=r"did not end within 0\.05 s"):
            await reader
        assert not runtime.health().ok

    asyncio.run(main())
    left = [each for each in {*threading.enumerate()} - before if each.name == "lamina-core"]
    go_on.set()
    for each in left:
        each.join(60)
    assert not [each for each in left if each.is_alive()]


class Listener:
    """Writes down what it hears."""

    def __init__(self, fails=False):
        self.steps, self.ends, self.fails = [], [], fails

    def outputs(self, outputs, now):
        if self.fails:
            raise ValueError("a listener of the test's")
        assert abs(now - time.monotonic()) < 60
        self.steps.append([(each.request_id, len(each.new_token_ids)) for each in outputs])

    def finished(self, request):
        self.ends.append(request)


def test_a_listener_hears_every_token_and_every_end(serve):
    async def body(runtime):
        heard, ill = Listener(), Listener(fails=True)
        runtime.listen(ill)
        runtime.listen(heard)
        params = SamplingParams(max_tokens=9, ignore_eos=True, n=2, seed=1, stop=["zzz"])
        await runtime.generate("hello", params, request_id="mine").output()
        with held(runtime) as engine:
            dropped = runtime.generate("hello", LONG, request_id="dropped")
            engine.begin(1)
            await dropped.read()
            del dropped
            while len(heard.ends) < 3:
                await asyncio.sleep(0.01)
        return heard

    heard = serve(body)
    first, second, dropped = heard.ends
    assert {first.index, second.index} == {0, 1}
    assert (first.request_id, first.n, first.num_output_tokens, first.max_tokens) == ("mine", 2, 9, 9)
    assert (first.finish_reason, first.error, first.num_prompt_tokens) == ("length", None, 2)
    assert (
        first.times.queued <= first.times.first_scheduled <= first.times.first_token <= first.times.finished
    )
    assert (dropped.request_id, dropped.finish_reason, dropped.max_tokens) == ("dropped", "abort", 200)
    assert sum(count for step in heard.steps for _, count in step) == 18 + 1


def test_a_request_that_cannot_be_queued_ends_alone_with_its_error(serve):
    async def body(runtime):
        generation = runtime.generate("hello", LONG)
        own = next(iter(runtime._client._live))
        heard = Listener()
        runtime.listen(heard)
        twin = EngineRequest(
            request_id=own,
            prompt_token_ids=(1,),
            params=LONG.resolve(None, seed=0),
            max_total_tokens=9,
            wants_each_token=True,
        )
        with held(runtime) as engine:
            engine.begin(1)
            await generation.read()
            runtime._client._handle.send(AddRequests(requests=(twin,)))
            with pytest.raises(RequestError, match="is in use"):
                await read_all(generation)
        assert runtime.health().ok
        return await ids_of(runtime.generate("hello", SHORT))

    assert len(serve(body)) == 12


def test_what_cannot_be_sent_to_the_core_leaves_nothing(serve, monkeypatch):
    def refuse(command):
        raise OSError("the way to the core is broken")

    async def body(runtime):
        client = runtime._client
        with monkeypatch.context() as patch:
            patch.setattr(client._handle, "send", refuse)
            with pytest.raises(OSError, match="broken"):
                runtime.generate("hello", LONG)
        assert not (client._live)
        assert not (client._asked)
        assert not (client._processor._answers)
        return await ids_of(runtime.generate("hello", SHORT))

    assert len(serve(body)) == 12


def test_a_method_that_fails_is_answered_by_its_error(serve, monkeypatch):
    async def body(runtime):
        with pytest.raises(EngineError, match="stats failed"):
            await runtime.call("stats", 1, 2)
        assert runtime.health().ok

    serve(body)


def test_captures_wait_until_nobody_asks_and_one_that_fails_ends_nothing(serve, monkeypatch, caplog):
    left = [True, True, KernelBuildError("no room")]

    def idle(core):
        assert not core.has_work
        found = left.pop(0) if left else False
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(EngineCore, "idle", idle)

    async def body(runtime):
        answer = await ids_of(runtime.generate("hello", SHORT))
        while "no room" not in caplog.text:
            await asyncio.sleep(0.01)
        assert not left
        left.extend([True, True])
        await runtime.call("suspend")
        await asyncio.sleep(0.05)
        assert len(left) == 2, "suspended"
        await runtime.call("resume")
        assert not left
        return answer

    assert len(serve(body)) == 12


def test_an_interrupt_in_code_of_a_request_ends_that_request(serve):
    """Raised in a step, where the main thread's Ctrl-C never arrives; it must not end the loop."""
    assert issubclass(InterruptAtRequestError, KeyboardInterrupt)

    async def body(runtime):
        with pytest.raises(ProcessorError):
            await runtime.generate("hello", failing(2, KeyboardInterrupt())).output()
        return await ids_of(runtime.generate("hello", SHORT))

    assert len(serve(body)) == 12


def test_messages_are_plain_data_and_a_call_is_answered_by_number(serve):
    async def body(runtime):
        first, second = await asyncio.gather(runtime.call("stats"), runtime.call("explain"))
        assert "requests" in first
        assert isinstance(second, str)
        assert Call(number=1, method="stats") == Call(number=1, method="stats")
        assert StepOutputs(outputs=()) == StepOutputs(outputs=())

    serve(body)
