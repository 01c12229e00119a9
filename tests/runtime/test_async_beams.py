"""Beam searches of an AsyncRuntime are those of a Runtime, end when nobody wants them, and count as one."""

import asyncio

import pytest

from lamina import AsyncRuntime, BeamSearchParams, RequestError, Runtime

from .asking import LONG, SHORT, SMALL, assert_ended, until

PROMPTS = ["hello", [5], [(17 * place) % 320 for place in range(37)]]
WIDE = BeamSearchParams(beam_width=4, max_tokens=10, length_penalty=0.5)
ENDLESS = BeamSearchParams(beam_width=2, ignore_eos=True)


def found_by(output):
    return [(a.token_ids, a.text, a.finish_reason, a.stop_reason, a.index) for a in output.outputs]


@pytest.fixture(scope="module")
def expected(tiny_text_folder):
    with Runtime.from_pretrained(tiny_text_folder, **SMALL) as runtime:
        return runtime.beam_search(PROMPTS, WIDE)


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_beams_are_those_of_a_runtime_whatever_else_is_served(tiny_text_folder, expected, engine):
    async def main():
        async with await AsyncRuntime.from_pretrained(tiny_text_folder, engine=engine, **SMALL) as runtime:
            beside = runtime.generate("hello", SHORT)
            outputs = await asyncio.gather(*(runtime.beam_search(prompt, WIDE) for prompt in PROMPTS))
            assert len((await beside.output()).outputs[0].token_ids) == 12
            assert (await runtime.stats())["requests"]["finished"] == len(PROMPTS) + 1
            return outputs

    for found, right in zip(asyncio.run(main()), expected, strict=True):
        assert found_by(found) == found_by(right)
        assert (found.prompt, found.prompt_token_ids) == (right.prompt, right.prompt_token_ids)
        for mine, blocking in zip(found.outputs, right.outputs, strict=True):
            assert mine.cumulative_logprob == pytest.approx(blocking.cumulative_logprob, abs=1e-4)


def test_the_default_is_that_of_a_runtime(serve, tiny_text_folder):
    async def main(runtime):
        return await runtime.beam_search([5], timeout=0.2)

    output = serve(main)
    assert {(a.finish_reason, a.stop_reason) for a in output.outputs} <= {
        ("abort", "deadline"),
        ("stop", None),
        ("length", None),
    }
    assert len(output.outputs) == 4


def test_an_abort_by_its_id_ends_a_search_with_what_it_has(serve):
    async def main(runtime):
        searching = asyncio.create_task(runtime.beam_search("hello", ENDLESS, request_id="mine"))
        other = runtime.generate("hello", LONG)

        async def is_aborted():
            return await runtime.abort("mine")

        await until(is_aborted)
        output = await searching
        assert output.request_id == "mine"
        assert {a.finish_reason for a in output.outputs} == {"abort"}
        assert not await runtime.abort("mine")
        assert len((await other.output()).outputs[0].token_ids) == LONG.max_tokens
        await assert_ended(runtime)

    serve(main)


def test_a_search_whose_task_is_cancelled_leaves_nothing(serve):
    async def main(runtime):
        for pause in (0, 0.001, 0.01, 0.05):
            searching = asyncio.create_task(runtime.beam_search("hello", ENDLESS))
            await asyncio.sleep(pause)
            searching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await searching
            await assert_ended(runtime)

    serve(main)


def test_listeners_hear_of_no_part_of_a_search_that_it_is_an_answer(serve):
    class Listener:
        def __init__(self):
            self.num_finished = 0

        def outputs(self, outputs, now):
            pass

        def finished(self, request):
            self.num_finished += 1

    async def main(runtime):
        listener = Listener()
        runtime.listen(listener)
        await runtime.beam_search("hello", WIDE)
        await runtime.generate("hello", SHORT).output()
        return listener.num_finished

    assert serve(main) == 1


@pytest.mark.parametrize(
    "prompt, params, options, message",
    [
        ("hello", SHORT, {}, "params is SamplingParams.*; wanted a BeamSearchParams"),
        ("hello", BeamSearchParams(beam_width=400), {}, "beam_width is 400; wanted at most"),
        (["hello", "you"], None, {}, "prompt"),
        ("hello", None, {"request_id": 5}, "request_id"),
        ("hello", None, {"timeout": -1}, "timeout"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_starts_nothing(serve, prompt, params, options, message):
    async def main(runtime):
        with pytest.raises(RequestError, match=message):
            await runtime.beam_search(prompt, params, **options)
        await assert_ended(runtime)

    serve(main)
