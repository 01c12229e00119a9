"""An error at one request ends that one; what cannot be told apart is tried again; figures count what was."""

import contextlib
import gc
import weakref

import pytest

from lamina import BeamSearchParams, EngineError, SamplingParams
from lamina.runtime.kv_cache.manager import KVCacheManager
from lamina.runtime.scheduler.admission import Admission
from lamina.runtime.scheduler.live_requests import LiveRequests
from lamina.runtime.scheduler.request_queue import RequestQueue
from lamina.runtime.scheduler.running_batch import RunningBatch
from lamina.runtime.tokenization.detokenizer import IncrementalDetokenizer
from lamina.runtime.worker.launched_step import LaunchedStep
from lamina.runtime.worker.model_runner import ModelRunner

from ..every_line import count

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PANICS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, min_tokens=3)


class Panic(BaseException):
    """What a tokenizer written in Rust raises."""


@pytest.fixture
def runtime(open_runtime, tiny_text_folder):
    return open_runtime(tiny_text_folder, block_size=4)


@contextlib.contextmanager
def canary_beside(runtime):
    """A stream that must end as it does alone."""
    alone = runtime.generate([[5, 6]], GREEDY)[0].outputs[0]
    canary = runtime.stream([5, 6], GREEDY)
    received = [next(canary)]
    yield
    received += canary
    assert tuple(token for delta in received for token in delta.token_ids) == alone.token_ids
    assert "".join(delta.text for delta in received) == alone.text


@pytest.mark.parametrize("name", ["append_token", "finish"])
@pytest.mark.parametrize("error", [ValueError, Panic, SystemExit])
def test_an_error_in_the_text_of_one_answer_ends_that_one(runtime, is_idle, monkeypatch, name, error):
    original = getattr(IncrementalDetokenizer, name)

    def panic(self, *arguments):
        if self._min_tokens == 3 and self.num_tokens >= 3:
            raise error("lost")
        return original(self, *arguments)

    monkeypatch.setattr(IncrementalDetokenizer, name, panic)
    with canary_beside(runtime):
        with pytest.raises(EngineError, match=f"text of this answer could not be made: {error.__name__}"):
            list(runtime.stream([7, 8], PANICS))
        with pytest.raises(EngineError, match="lost"):
            runtime.generate([[7, 8]], PANICS)
    is_idle(runtime)


AT_ONE = [
    (KVCacheManager, "admit", 0),
    (KVCacheManager, "commit", 0),
    (Admission, "give_row", 0),
    (RunningBatch, "append", 0),
]


@pytest.mark.parametrize("times", [1, 10**9], ids=["once", "always"])
@pytest.mark.parametrize(
    "owner, name, place", AT_ONE, ids=[f"{owner.__name__}.{name}" for owner, name, _ in AT_ONE]
)
def test_an_error_where_one_request_is_seen_to_ends_that_one(
    runtime, is_idle, monkeypatch, owner, name, place, times
):
    original, left = getattr(owner, name), [times]

    def fail_at_victim(self, *arguments, **named):
        if arguments[place].cache_salt == "victim" and left[0]:
            left[0] -= 1
            raise KeyError("lost")
        return original(self, *arguments, **named)

    monkeypatch.setattr(owner, name, fail_at_victim)
    with canary_beside(runtime), pytest.raises(EngineError, match="which ends alone: KeyError") as raised:
        runtime.generate([[7] * 9], GREEDY, cache_salt="victim")
    assert isinstance(raised.value.__cause__, KeyError)
    is_idle(runtime)
    runtime._loaded.core.scheduler.check()


def test_what_waits_is_found_in_as_few_steps_with_ten_thousand_priorities_as_with_one(make_server):
    def lines(priorities):
        server = make_server(blocks=4, seqs=1)
        for number in range(10_000):
            server.add(str(number), 1, options={"priority": number % priorities})
        queue = server.scheduler._queue
        return count(lambda: (len(queue), queue.first(), queue.discard(queue.first()), queue.first()))

    assert lines(10_000) <= lines(1) + 5


def test_a_queue_gives_out_who_ranks_first_whoever_comes_and_goes(make_server):
    server = make_server(blocks=4)
    requests = [server.add(str(n), 1, options={"priority": -n % 7}) for n in range(40)]
    queue = RequestQueue()
    for request in requests:
        queue.append(request)
    for request in requests[::3]:
        queue.discard(request)
    for request in requests[::6]:
        queue.append(request)
    left = sorted({*requests} - {*requests[::3]} | {*requests[::6]}, key=lambda request: request.rank)
    given = []
    while len(queue):
        queue.check()
        given.append(queue.first())
        queue.discard(given[-1])
    assert given == left


def test_answers_go_on_in_every_step_beside_a_prompt_of_better_rank(make_server):
    server = make_server(blocks=60, seqs=4, budget=6, context=60)
    answers = [server.add(name, 2, seed, max_tokens=20) for seed, name in enumerate("abc")]
    while not all(request.output_token_ids for request in answers):
        server.step()
    urgent = server.add("urgent", 30, 7, max_tokens=2, options={"priority": -1})
    while not urgent.output_token_ids:
        before = [len(request.output_token_ids) for request in answers]
        server.step()
        assert [len(request.output_token_ids) for request in answers] == [number + 1 for number in before]
    server.drain()
    for request in (*answers, urgent):
        assert request.output_token_ids == server.alone(request)[0]


def test_the_first_of_all_advances_even_where_answers_take_the_whole_budget(make_server):
    server = make_server(blocks=60, seqs=4, budget=3, context=60)
    for seed, name in enumerate("abc"):
        server.add(name, 1, seed, max_tokens=40)
    server.step()
    server.step()
    urgent = server.add("urgent", 5, 7, max_tokens=2, options={"priority": -1})
    server.scheduler.abort("c")
    for _ in range(10):
        server.step()
    assert urgent.output_token_ids == server.alone(urgent)[0]


def test_an_urgent_request_takes_no_row_from_those_that_run(make_server):
    server = make_server(blocks=20, seqs=1)
    running = server.add("running", 4, max_tokens=6)
    server.step()
    urgent = server.add("urgent", 4, 1, max_tokens=2, options={"priority": -1})
    plans = server.drain()
    assert [plan.request_ids for plan in plans] == [("running",)] * 5 + [("urgent",)] * 2
    assert (running.num_preemptions, urgent.num_preemptions) == (0, 0)


@pytest.mark.parametrize("how", ["failed", "without a cache", "prompt reported"])
def test_tokens_count_as_looked_up_and_found_once_a_step_that_did_so_is_over(make_server, how):
    server = make_server(blocks=40, prefix_cache=how != "without a cache", depth=2)
    server.add("first", (1, 2, 3, 4) * 4, max_tokens=1)
    server.drain()
    begun = server.scheduler.num_queried_tokens, server.scheduler.num_hit_tokens
    assert begun == (0 if how == "without a cache" else 16, 0)
    reported = {"prompt_logprobs": 0} if how == "prompt reported" else {}
    again = server.add("again", (1, 2, 3, 4) * 4, max_tokens=1, **reported)
    server.launch()
    if how == "failed":
        assert again.num_cached_tokens > 0
        server.fail(0)
        server.scheduler.abort("again")
    server.drain()
    assert (server.scheduler.num_queried_tokens, server.scheduler.num_hit_tokens) == begun
    assert again.num_cached_tokens == 0


def test_a_beam_search_counts_as_one_request_with_one_first_token(runtime):
    runtime.beam_search([[5, 6]], BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True))
    assert runtime.stats()["requests"]["finished"] == 1
    latencies = runtime._loaded.core.latencies
    assert (len(latencies._first_token), len(latencies._between_tokens)) == (1, 1)


def test_times_between_tokens_are_those_of_each_answer(runtime):
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, n=4, logprobs=0)
    output = runtime.generate([[5, 6]], params)[0]
    own = [answer.seconds_between_tokens for answer in output.outputs]
    for answer, seconds in zip(output.outputs, own, strict=True):
        assert seconds == (answer.times.finished - answer.times.first_token) / 5
    assert output.seconds_between_tokens == pytest.approx(sum(own) / 4)
    late = runtime.generate([[5, 6]], SamplingParams(logprobs=0), timeout=1e-9)[0].outputs[0]
    assert (late.token_ids, late.cumulative_logprob, type(late.cumulative_logprob)) == ((), 0.0, float)
    assert late.seconds_between_tokens is None


@pytest.mark.parametrize("name", ["end", "_give_back"])
@pytest.mark.parametrize("times", [1, 10**9], ids=["once", "always"])
def test_an_error_at_an_end_leaves_the_answer_whole(runtime, is_idle, monkeypatch, name, times):
    right = runtime.generate([[7] * 9], GREEDY)[0].outputs[0].token_ids
    original, left = getattr(LiveRequests, name), [times]

    def fail_at_victim(self, request, *arguments):
        if request.cache_salt == "victim" and left[0]:
            left[0] -= 1
            raise KeyError("lost")
        return original(self, request, *arguments)

    monkeypatch.setattr(LiveRequests, name, fail_at_victim)
    with canary_beside(runtime):
        answer = runtime.generate([[7] * 9], GREEDY, cache_salt="victim")[0].outputs[0]
    assert (answer.token_ids, answer.finish_reason) == (right, "length")
    is_idle(runtime)


@pytest.mark.parametrize("kind, name", [(ModelRunner, "execute"), (LaunchedStep, "read")])
def test_a_failed_step_is_let_go_before_the_next_one(runtime, monkeypatch, kind, name):
    class Activations:
        pass

    original, held, alive = getattr(kind, name), [], []

    def fail_once(self, *arguments):
        alive.append(bool(held) and held[0]() is not None)
        if held:
            return original(self, *arguments)
        activations = Activations()
        held.append(weakref.ref(activations))
        raise RuntimeError("once")

    monkeypatch.setattr(kind, name, fail_once)
    gc.disable()
    try:
        runtime.generate([[5]], GREEDY)
    finally:
        gc.enable()
    assert alive
    assert not any(alive)
