"""Calls of many prompts: a step is launched before all are made, and all else is as if they had been."""

import contextlib
import itertools
import threading

import numpy as np
import pytest

from lamina import Runtime, SamplingParams
from lamina.common.errors import ClosedError, RequestError
from lamina.runtime.engine.first_step import FirstStep
from lamina.runtime.engine.input_processor import InputProcessor
from lamina.runtime.engine.pooling_processor import PoolingProcessor
from lamina.runtime.kv_cache.block_pool import BlockPool
from lamina.runtime.kv_cache.manager import KVCacheManager
from lamina.runtime.request_options import RequestOptions
from lamina.runtime.startup import engine_builder
from lamina.runtime.worker.model_runner import ModelRunner

from ..every_line import count, happening, raising, traced

LENGTHS = (5, 9, 3, 7, 1, 12, 4, 4, 6, 2)
PROMPTS = [[(7 * place + 3 * number) % 250 + 3 for place in range(n)] for number, n in enumerate(LENGTHS)]
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
# 16 tokens: the first three prompts are 17.
SETTINGS = {"compile": False, "max_num_batched_tokens": 16, "block_size": 4, "num_kv_blocks": 60}
NUM_FIRST = 3
MAKERS = {"embed": (PoolingProcessor, "request"), "generate": (InputProcessor, "_prepare")}


@pytest.fixture(scope="module", params=[1, 2], ids=["read at once", "read a step late"])
def runtime(request, tiny_folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(engine_builder.DEPTHS, "cpu", request.param)
        with Runtime.from_pretrained(tiny_folder, pooling="last", **SETTINGS) as runtime:
            yield runtime


@pytest.fixture
def ahead(runtime):
    """Whether a step is launched before all are made."""
    return runtime._loaded.core.depth > 1


KINDS = ("embed", "generate")
NUMBERS = itertools.count()


def ask(runtime, kind, prompts=PROMPTS, **options):
    """Vectors or answers of prompts that the prefix cache has nothing of."""
    options = {"cache_salt": f"call {next(NUMBERS)}"} | options
    if kind == "embed":
        return [each.data for each in runtime.embed(prompts, **options)]
    return [each.outputs[0].token_ids for each in runtime.generate(prompts, GREEDY, **options)]


@pytest.fixture
def happened(monkeypatch):
    """happened(kind) -> what was "made" and "launched" since, as it goes."""

    def watch(kind):
        events = []

        def watching(owner, name, what):
            original = getattr(owner, name)

            def call(*args, **kwargs):
                events.append(what)
                return original(*args, **kwargs)

            monkeypatch.setattr(owner, name, call)

        watching(*MAKERS[kind], "made")
        watching(ModelRunner, "execute", "launched")
        return events

    return watch


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_launched_once_it_is_full_and_no_other_before_all_are_made(runtime, ahead, happened, kind):
    events = happened(kind)
    ask(runtime, kind)
    made, first = events.count("made"), events.index("launched")
    assert (made, first) == (len(PROMPTS), NUM_FIRST if ahead else len(PROMPTS))
    assert events[first + 1 :].count("made") == made - first
    assert events[first + 1 : first + 1 + made - first].count("launched") == 0


@pytest.mark.parametrize("kind", KINDS)
def test_steps_and_results_are_those_of_prompts_that_were_all_there(runtime, monkeypatch, kind):
    plans, execute = [], ModelRunner.execute

    def watch(self, plan):
        plans.append(
            [*zip(plan.num_scheduled_tokens.tolist(), plan.num_computed_tokens.tolist(), strict=True)]
        )
        return execute(self, plan)

    monkeypatch.setattr(ModelRunner, "execute", watch)
    found, own = ask(runtime, kind), plans[:]
    plans.clear()
    monkeypatch.setattr(runtime._client, "_first_step", None)
    assert ask(runtime, kind) == found
    assert plans == own


def test_vectors_of_many_are_those_of_each_alone(runtime):
    together = runtime.embed(PROMPTS)
    for prompt, output in zip(PROMPTS, together, strict=True):
        (alone,) = runtime.embed([prompt], cache_salt="alone")
        np.testing.assert_allclose(output.embedding, alone.embedding, rtol=0, atol=1e-5)
        assert output.num_prompt_tokens == len(prompt)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [0, NUM_FIRST - 1, NUM_FIRST, len(PROMPTS) - 1])
def test_a_bad_prompt_fails_the_call_by_its_name_and_leaves_nothing(runtime, is_idle, kind, place):
    right = ask(runtime, kind)
    bad = [*PROMPTS]
    bad[place] = [5, 10**6]
    name = {"embed": "texts", "generate": "prompts"}[kind]
    with pytest.raises(RequestError, match=rf"^{name}\[{place}\]: prompt token 1000000 at position 1"):
        ask(runtime, kind, bad)
    is_idle(runtime)
    assert_nothing_left(runtime)
    assert ask(runtime, kind) == right


def assert_nothing_left(runtime):
    core = runtime._loaded.core
    core.scheduler.check()
    assert not core.has_work
    assert not core._live
    assert not runtime._client._processor._answers
    assert not runtime._client._asked


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_at_any_line_leaves_nothing(runtime, is_idle, kind):
    right = ask(runtime, kind)
    total = count(lambda: ask(runtime, kind))
    for place in range(1 + total % 37, total, max(1, total // 37)):
        with contextlib.suppress(KeyboardInterrupt), traced(happening(raising(KeyboardInterrupt), place)):
            ask(runtime, kind)
        is_idle(runtime)
        assert_nothing_left(runtime)
    assert ask(runtime, kind) == right


def test_an_interrupt_while_the_others_are_made_ends_the_step_that_was_launched(
    runtime, ahead, is_idle, monkeypatch
):
    right, make, made = ask(runtime, "embed"), PoolingProcessor.request, []

    def interrupted(self, *arguments):
        made.append(None)
        if len(made) > NUM_FIRST + 2:
            assert runtime._loaded.core.has_work == ahead
            raise KeyboardInterrupt
        return make(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(PoolingProcessor, "request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ask(runtime, "embed")
    is_idle(runtime)
    assert_nothing_left(runtime)
    assert ask(runtime, "embed") == right


def test_deadlines_count_from_when_all_are_made(runtime, happened):
    events = happened("embed")
    ask(runtime, "embed", timeout=60.0)
    assert events.index("launched") == len(PROMPTS)


def test_whoever_sleeps_is_asked_as_before(runtime, is_idle):
    right = ask(runtime, "embed")
    runtime.sleep()
    with pytest.raises(RequestError, match=r"texts\[9\]"):
        ask(runtime, "embed", [*PROMPTS[:-1], [-1]])
    with pytest.raises(RequestError, match="this runtime sleeps"):
        ask(runtime, "embed")
    runtime.wake()
    is_idle(runtime)
    assert ask(runtime, "embed") == right


def test_threads_that_ask_at_once_get_their_own_results(runtime, is_idle):
    right = {kind: ask(runtime, kind) for kind in KINDS}
    found = []

    def ask_thrice(kind):
        found.extend((kind, ask(runtime, kind)) for _ in range(3))

    threads = [threading.Thread(target=ask_thrice, args=(kind,)) for kind in KINDS * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(found) == 12
    for kind, results in found:
        if kind == "generate":
            assert results == right[kind]
            continue
        for one, other in zip(results, right[kind], strict=True):
            np.testing.assert_allclose(np.frombuffer(one, "<f4"), np.frombuffer(other, "<f4"), atol=1e-5)
    is_idle(runtime)


def test_whoever_asks_while_another_thread_closes_is_told_so(tiny_folder, monkeypatch):
    monkeypatch.setitem(engine_builder.DEPTHS, "cpu", 2)
    runtime = Runtime.from_pretrained(tiny_folder, **SETTINGS)
    inside = runtime._client._inside

    class Closing:
        """Closes when it is looked at first."""

        __enter__, __exit__, is_first = inside.__enter__, inside.__exit__, True

        def locked(self):
            if self.is_first:
                self.is_first = False
                closer = threading.Thread(target=runtime.close)
                closer.start()
                closer.join(timeout=60)
            return inside.locked()

    monkeypatch.setattr(runtime._client, "_inside", Closing())
    with pytest.raises(ClosedError):
        runtime.generate(PROMPTS, GREEDY)


def taken(runtime, prompts, options=None, **limits):
    """How many of these are taken by a step of 16 tokens and 8 rows, in blocks of 4 and chunks of 16."""
    kv_cache = runtime._loaded.kv_cache
    step = FirstStep(**{"num_tokens": 16, "num_rows": 8, "chunk": 16, "kv_cache": kv_cache} | limits)
    asked = runtime._open_input.prepare_each(
        prompts, None, RequestOptions(**options or {"cache_salt": "new"})
    )
    first = step.take(asked)
    assert [each.submissions[0].request.prompt_token_ids for each in (*first, *asked)] == [
        *map(tuple, prompts)
    ]
    return len(first)


def test_what_fills_a_step_is_counted_by_tokens_rows_and_chunks(runtime):
    apart = [[number] * 6 for number in range(20)]
    assert taken(runtime, apart) == 3
    assert taken(runtime, apart[:2]) == 2
    assert taken(runtime, apart, num_rows=2) == 2
    assert taken(runtime, apart, chunk=2) == 8
    assert taken(runtime, [[5] * 40, *apart]) == 1
    assert taken(runtime, [[5] * 40, *apart], chunk=8) == 3


def test_prompts_that_begin_alike_are_taken_together(runtime):
    alike = [[1, 2, 3, 4, number, 9, 9, 9, 9, 9] for number in range(7)]
    assert taken(runtime, alike) == 7
    assert taken(runtime, [*alike, [8] * 6, [9] * 6, [10] * 6]) == 8  # rows
    assert taken(runtime, [alike[0], [8] * 6, alike[1], [9] * 6]) == 2
    assert taken(runtime, [alike[0], [8] * 3, alike[1], [9] * 6]) == 4
    assert taken(runtime, [[1, 2, 3], [1, 2, 3, 4]] * 9, num_rows=99) == 5, "no block to be shared"
    without = KVCacheManager(BlockPool(9), 4)
    assert taken(runtime, alike, kv_cache=without) == 2


def test_prompts_that_the_prefix_cache_may_have_are_taken_together(runtime):
    fresh, known = [[number] * 6 for number in range(20)], [[7, 7, 7, 7, number, 9] for number in range(4)]
    runtime.embed([known[0]], cache_salt="known")
    assert taken(runtime, [*known, *fresh[:7]], {"cache_salt": "known"}) == 7
    assert taken(runtime, [known[0], *fresh[:7]], {"cache_salt": "unknown"}) == 3
