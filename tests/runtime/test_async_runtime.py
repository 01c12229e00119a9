"""An AsyncRuntime answers as a Runtime does, whoever else asks; nothing is left of what is cancelled."""

import asyncio
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lamina import ClosedError, LaminaError, RequestError, Runtime, SamplingParams

from ..engine_gate import held
from .asking import (
    LONG,
    SHORT,
    SMALL,
    as_deltas,
    assert_ended,
    assert_near,
    iterate,
    read_slowly,
    text_of,
    tokens_of,
    true_of,
    until,
)


@pytest.fixture(scope="module")
def blocking(tiny_text_folder):
    runtime = Runtime.from_pretrained(tiny_text_folder, **SMALL)
    yield runtime
    runtime.close()


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    seed=st.integers(0, 9),
    max_tokens=st.integers(1, 16),
    stop=st.sampled_from([None, "e", ["he", "l"], "\ufffd"]),
    n=st.sampled_from([1, 1, 1, 3]),
    logprobs=st.sampled_from([None, None, 2]),
    prompt_logprobs=st.sampled_from([None, None, 1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    detokenize=st.sampled_from([None, True]),
    include_stop_str_in_output=st.booleans(),
)
PROMPTS = st.one_of(
    st.text(st.sampled_from("hel wort🙂é"), min_size=1, max_size=40),
    st.lists(st.integers(0, 319), min_size=1, max_size=60),
)
WHOLE, PIECES, SLOWLY = "whole", "pieces", "slowly"
CANCELLED, DROPPED, CLOSED = "cancelled", "dropped", "closed"
WAYS = st.sampled_from([WHOLE, PIECES, SLOWLY, CANCELLED, DROPPED, CLOSED])


async def ask(runtime, prompt, params, way, pauses):
    """Asks in one of several ways; whole answers come back, of what is ended early what was read."""
    generation = runtime.generate(prompt, params)
    if way == WHOLE:
        return await generation.output()
    if way == PIECES:
        return await iterate(generation)
    if way == SLOWLY:
        return await read_slowly(generation, pauses)
    most = pauses.randrange(1, 6)
    if way == CANCELLED:
        task = asyncio.create_task(iterate(generation))
        for _ in range(most):
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() is False or await generation.read() == []
        return None
    deltas = await iterate(generation, most)
    if way == CLOSED:
        await generation.aclose()
        assert await generation.read() == []
    return deltas


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=12)
@given(asked=st.lists(st.tuples(PROMPTS, PARAMS, WAYS), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_alone_batched_and_blocking_are_equal_whoever_gives_up(serve, blocking, asked, seed):
    pauses = random.Random(seed)

    async def body(runtime):
        return await asyncio.gather(*(ask(runtime, *each, pauses) for each in asked))

    found = serve(body)
    for (prompt, params, way), got in zip(asked, found, strict=True):
        right = blocking.generate([prompt], params)[0]
        if way == WHOLE:
            assert got.prompt_token_ids == right.prompt_token_ids
            assert_near(got.prompt_logprobs, right.prompt_logprobs)
            got = [one for answer in got.outputs for one in as_deltas(answer)]
        for index, whole in enumerate(right.outputs if got is not None else ()):
            own = [delta for delta in got if delta.index == index]
            ids = tokens_of(own)
            assert whole.text.startswith(text_of(own))
            assert whole.token_ids[: len(ids)] == ids
            assert_near([e for d in own for e in d.logprobs or ()], (whole.logprobs or ())[: len(ids)])
            assert all(delta.finish_reason is None for delta in own[:-1])
            if way in (WHOLE, PIECES, SLOWLY):
                assert (text_of(own), ids) == (whole.text, whole.token_ids)
                last = own[-1]
                assert (last.finish_reason, last.stop_reason) == (whole.finish_reason, whole.stop_reason)


def test_a_text_read_so_far_is_never_taken_back_nor_part_of_a_stop_string(serve):
    stop = ["he", "\ufffdx", "l", "zz"]
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=40, stop=stop, include_stop_str_in_output=False)
        for seed in range(12)
    ]

    async def body(runtime):
        pauses = random.Random(5)
        asked = [runtime.generate("hello", each) for each in params]
        whole = [runtime.generate("hello", each) for each in params]
        pieces = await asyncio.gather(*(read_slowly(each, pauses) for each in asked))
        return pieces, [(await each.output()).outputs[0] for each in whole]

    pieces, whole = serve(body)
    assert [text_of(deltas) for deltas in pieces] == [answer.text for answer in whole]
    assert any(answer.stop_reason in stop for answer in whole)
    for deltas in pieces:
        assert not [string for string in stop if string in text_of(deltas)]


def test_a_chat_is_answered_as_by_the_blocking_runtime(serve, blocking):
    messages = [{"role": "user", "content": "hello"}]

    async def body(runtime):
        return await runtime.chat(messages, SHORT).output()

    assert serve(body).outputs == blocking.chat(messages, SHORT).outputs


def test_the_best_of_several_are_known_at_the_end_and_not_before(serve, blocking):
    params = SamplingParams(temperature=1.0, seed=3, n=2, best_of=4, max_tokens=10)

    async def body(runtime):
        generation = runtime.generate("hello", params)
        assert generation.num_answers == 2
        with pytest.raises(RequestError, match="best_of is 4, above n 2"):
            await generation.read()
        with pytest.raises(RequestError, match="best_of"):
            await anext(generation)
        return await generation.output()

    found, right = serve(body), blocking.generate("hello", params)[0]
    assert [answer.token_ids for answer in found.outputs] == [answer.token_ids for answer in right.outputs]


def test_a_bad_request_is_refused_at_once_and_leaves_nothing(serve):
    async def body(runtime):
        for bad, match in (
            (lambda: runtime.generate([999]), "vocabulary"),
            (lambda: runtime.generate(["a", "b"]), "prompt"),
            (lambda: runtime.generate("a", SamplingParams(logit_bias={5000: 1.0})), "logit_bias"),
            (lambda: runtime.generate("a", request_id=5), "request_id is 5"),
            (lambda: runtime.generate("a", request_id="\ud800"), "request_id"),
            (lambda: runtime.generate("a", priorty=1), "priorty"),
            (lambda: runtime.generate("a", 7), "params is 7"),
            (lambda: runtime.chat("hello"), "messages"),
        ):
            with pytest.raises(RequestError, match=match):
                bad()

    serve(body)


def test_a_request_is_queued_before_anybody_reads_it(serve):
    async def body(runtime):
        generation = runtime.generate("hello", SHORT)
        await until(lambda: true_of(generation.num_output_tokens == 12))
        assert generation.num_cached_tokens == 0
        deltas = await generation.read()
        return len(deltas), tokens_of(deltas)

    count, ids = serve(body)
    assert count == 1, "a slow reader gets all that piled up as one"
    assert len(ids) == 12


def test_pieces_can_be_iterated_then_read_and_then_taken_whole(serve):
    async def body(runtime):
        generation = runtime.generate("hello", SamplingParams(temperature=0, max_tokens=30, n=2, seed=1))
        deltas = [await anext(generation), await anext(generation)]
        deltas += await generation.read()
        whole = await generation.output()
        while new := await generation.read():
            deltas += new
        assert [delta async for delta in generation] == []
        assert generation.num_output_tokens == len(tokens_of(deltas))
        return whole, deltas

    whole, deltas = serve(body)
    for answer in whole.outputs:
        assert text_of([delta for delta in deltas if delta.index == answer.index]) == answer.text


@pytest.mark.parametrize("most", [1, 3, 7, 1000])
def test_who_is_notified_reads_what_a_task_would_so_many_tokens_at_a_time(serve, most):
    params = SamplingParams(n=3, max_tokens=20, ignore_eos=True, temperature=1.2, seed=5)

    async def body(runtime):
        generation, news, deltas = runtime.generate("hello", params), asyncio.Event(), []
        generation.notify(news.set)
        while not generation.is_read:
            new = generation.read_nowait(most)
            assert len(tokens_of(new)) <= most
            deltas += new
            if not new:
                await news.wait()
                news.clear()
        assert generation.read_nowait() == []
        return deltas, await generation.output()

    deltas, output = serve(body)
    for answer in output.outputs:
        own = [delta for delta in deltas if delta.index == answer.index]
        assert (text_of(own), tokens_of(own)) == (answer.text, answer.token_ids)
        assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + ["length"]


def test_readers_with_one_callback_are_notified_once_for_all_that_came_together(serve):
    async def body(runtime):
        calls, num_deltas, before = 0, 0, runtime.health().status.num_steps
        is_over = asyncio.Event()

        def read_all():
            nonlocal calls, num_deltas
            calls += 1
            num_deltas += sum(len(each.read_nowait()) for each in asked)
            if all(each.is_read for each in asked):
                is_over.set()

        with held(runtime) as engine:
            for each in (asked := [runtime.generate([each], SHORT) for each in range(1, 6)]):
                each.notify(read_all)
            engine.wait_for(5)
        await is_over.wait()
        return calls, num_deltas, runtime.health().status.num_steps - before

    calls, num_deltas, num_steps = serve(body)
    assert calls <= num_steps
    assert num_deltas == 5 * calls


def test_an_error_is_raised_to_who_is_notified_once_what_came_before_is_read(serve):
    def failing(prompt_ids, token_ids, logits):
        if len(token_ids) == 4:
            raise ValueError("no more")
        return logits

    async def body(runtime):
        params = SamplingParams(max_tokens=20, ignore_eos=True, logits_processors=[failing])
        generation, news, deltas = runtime.generate("hello", params), asyncio.Event(), []

        async def read_all():
            generation.notify(news.set)
            while True:
                deltas.extend(generation.read_nowait())
                if not generation.is_read:
                    await news.wait()
                    news.clear()

        with pytest.raises(LaminaError, match="no more"):
            await read_all()
        return deltas

    assert len(tokens_of(serve(body))) == 4


def test_who_is_notified_no_more_is_not_called(serve):
    async def body(runtime):
        calls, generation = [], runtime.generate("hello", SHORT)
        generation.notify(lambda: calls.append(1))
        generation.notify(None)
        await generation.output()
        return calls

    assert serve(body) == []


def test_two_readers_of_one_answer_share_its_pieces(serve):
    async def body(runtime):
        generation = runtime.generate("hello", SHORT)
        found = await asyncio.gather(iterate(generation), iterate(generation))
        return [tokens_of(deltas) for deltas in found]

    found = serve(body)
    assert sum(map(len, found)) == 12


@pytest.mark.parametrize("wait", ["read", "output", "iterate"])
@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 20])
def test_to_cancel_a_task_at_any_await_ends_its_request(serve, wait, turns):
    async def read(generation):
        if wait == "output":
            await generation.output()
        elif wait == "read":
            while await generation.read():
                pass
        else:
            await iterate(generation)

    async def body(runtime):
        with held(runtime) as engine:
            generation = runtime.generate("hello", LONG)
            tasks = [asyncio.create_task(read(generation)), asyncio.create_task(read(generation))]
            for _ in range(turns):
                engine.let(1)
                await asyncio.sleep(0.001 if turns > 5 else 0)
            tasks[0].cancel()
            tasks[1].cancel()
            await asyncio.wait(tasks)
            assert generation.num_output_tokens <= turns
            if turns:
                with pytest.raises(ClosedError):
                    await generation.output()

    serve(body)


def test_requests_asked_aborted_and_dropped_at_random_leave_nothing_behind(serve):
    chance = random.Random(11)
    num_tasks, num_each = 10, 100

    async def client(runtime, number):
        held = []
        for turn in range(num_each):
            name = f"{number}-{turn % 7}"
            params = SamplingParams(
                max_tokens=chance.randrange(1, 40), seed=turn, n=chance.choice([1, 1, 1, 2]), stop=["q"]
            )
            prompt = [chance.randrange(320) for _ in range(chance.randrange(1, 30))]
            held.append(runtime.generate(prompt, params, request_id=name, priority=chance.randrange(3)))
            action = chance.randrange(6)
            if action == 0:
                await runtime.abort(name)
            elif action == 1:
                held.clear()
            elif action == 2:
                await held.pop().aclose()
            elif action == 3:
                reader = asyncio.create_task(iterate(held[-1]))
                await asyncio.sleep(chance.random() / 100)
                reader.cancel()
            elif action == 4 and len(held) > 1:
                await held.pop().output()
            await asyncio.sleep(0)

    async def body(runtime):
        before = (await runtime.stats())["requests"]["finished"]
        await asyncio.gather(*(client(runtime, number) for number in range(num_tasks)))
        await assert_ended(runtime)
        return (await runtime.stats())["requests"]["finished"] - before

    assert serve(body) >= num_tasks * num_each


def test_an_abort_by_the_callers_id_ends_all_that_have_it_and_no_other(serve):
    async def body(runtime):
        with held(runtime) as engine:
            ended = [runtime.generate("a", LONG, request_id="mine") for _ in range(3)]
            other = runtime.generate("a", SHORT)
            engine.begin(4)
            await ended[0].read()
            assert await runtime.abort("mine")
            assert not await runtime.abort("yours")
            outputs = [await each.output() for each in ended]
        assert {output.request_id for output in outputs} == {"mine"}
        assert {output.outputs[0].finish_reason for output in outputs} == {"abort"}
        assert (await other.output()).outputs[0].finish_reason == "length"
        assert not await runtime.abort("mine")

    serve(body)


def test_who_waits_behind_others_ends_at_his_deadline(serve):
    async def body(runtime):
        running = [runtime.generate([1, 2], LONG) for _ in range(6)]
        waiting = runtime.generate([3], LONG, timeout=0.02)
        answer = (await waiting.output()).outputs[0]
        assert (answer.finish_reason, answer.stop_reason) == ("abort", "deadline")
        for each in running:
            await each.aclose()

    serve(body)
