"""The books of a server: what outputs and ends come to, and that clients cannot make them grow."""

import random

import pytest

from lamina.common.errors import LogitsError
from lamina.runtime.engine.async_client import FinishedRequest
from lamina.runtime.protocol.engine_output import EngineOutput, Finish, Timeline
from lamina.serving.metrics.histogram import Histogram, lengths_up_to
from lamina.serving.metrics.metrics import REFUSALS, Metrics


def output(request_id, num_before, *token_ids, is_last=False):
    finish = Finish(reason="length", times=Timeline()) if is_last else None
    return EngineOutput(
        request_id=request_id, num_before=num_before, new_token_ids=tuple(token_ids), finish=finish
    )


def ended(**own):
    times = Timeline(queued=1.0, first_scheduled=1.5, first_token=2.0, finished=4.0)
    told = {
        "request_id": "a",
        "index": 0,
        "times": times,
        "num_prompt_tokens": 7,
        "num_output_tokens": 3,
        "num_cached_tokens": 0,
        "num_preemptions": 0,
        "finish_reason": "stop",
        "max_tokens": 16,
        "n": 1,
        "error": None,
    }
    return FinishedRequest(**told | own)


def test_a_histogram_counts_a_value_at_its_bound_and_below_all_above():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert (histogram.sum, histogram.count) == (14.0, 5)


def test_bounds_of_lengths_reach_the_longest_and_end_there():
    assert lengths_up_to(60) == [1, 2, 5, 10, 20, 50, 100]
    assert lengths_up_to(50)[-1] == 50


def test_times_between_tokens_are_those_of_each_request():
    metrics = Metrics("m")
    metrics.outputs([output("a", 0, 5), output("b", 0, 5)], now=1.0)
    metrics.outputs([output("a", 1, 6)], now=1.5)
    metrics.outputs([output("a", 2, 7, is_last=True), output("b", 1, 6, 7, is_last=True)], now=2.0)
    assert metrics.between_tokens.count == 4  # two of each; b's came at once after a second
    assert metrics.between_tokens.sum == pytest.approx(0.5 + 0.5 + 1.0)
    assert metrics.num_generated_tokens == 6
    assert (metrics.step_tokens.count, metrics.step_tokens.sum) == (3, 6)


def test_tokens_that_are_told_twice_are_counted_once():
    metrics = Metrics("m")
    metrics.outputs([output("a", 0, 5, 6)], now=1.0)
    metrics.outputs([output("a", 0, 5, 6)], now=2.0)
    metrics.outputs([output("a", 1, 6, 7)], now=3.0)
    assert metrics.num_generated_tokens == 3
    assert metrics.between_tokens.sum == pytest.approx(2.0)


def test_nothing_is_left_of_requests_that_have_ended():
    metrics, random_source = Metrics("m"), random.Random(3)
    for number in range(500):
        last = random_source.randrange(3)
        for step in range(last + 1):
            metrics.outputs([output(f"r{number}", step, 1, is_last=step == last)], now=float(number))
    assert not metrics._live


def test_an_answer_is_counted_by_its_end_and_its_phases_are_timed():
    metrics = Metrics("m")
    metrics.finished(ended())
    metrics.finished(ended(finish_reason="abort", error=LogitsError("nan")))
    assert metrics.finished_by_reason == {"stop": 1, "length": 0, "abort": 0, "error": 1}
    sums = [each.sum / 2 for each in (metrics.queue, metrics.prefill, metrics.decode, metrics.whole)]
    assert sums == [0.5, 0.5, 2.0, 3.0]
    assert metrics.first_token.sum == 2.0
    assert (metrics.per_token.count, metrics.per_token.sum) == (2, 2.0)  # three tokens each


def test_what_never_began_is_counted_without_times():
    metrics = Metrics("m")
    metrics.finished(ended(times=Timeline(queued=1.0, finished=2.0), num_output_tokens=0))
    assert metrics.first_token.count == metrics.queue.count == metrics.per_token.count == 0
    assert metrics.whole.count == 1


def test_answers_to_one_prompt_count_it_once():
    metrics = Metrics("m")
    for index in range(3):
        metrics.finished(ended(index=index, n=3))
    assert metrics.num_prompt_tokens == 7
    assert metrics.num_answers.count == 1
    assert metrics.output_lengths.count == 3


def test_reasons_of_refusals_are_a_fixed_set():
    metrics = Metrics("m")
    for number in range(50):
        metrics.answered("unmatched", 429, f"code{number}")
    metrics.answered("/v1/models", 429, "queue_full")
    metrics.answered("/v1/models", 200)
    metrics.answered("/v1/models", 404, "model_not_found")
    assert set(metrics.refused_by_reason) == set(REFUSALS)
    assert metrics.refused_by_reason["other"] == 50
    assert metrics.refused_by_reason["queue_full"] == 1
    assert sum(metrics.refused_by_reason.values()) == 51
