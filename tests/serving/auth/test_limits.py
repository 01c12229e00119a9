"""Buckets by the minute: what may be taken when, and what a client is told of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.serving.auth.limits import Bucket, Limits, Meter, spoken
from lamina.serving.errors import ApiError


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(
    per_minute=st.integers(1, 10_000),
    moves=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 300)), max_size=60),
)
def test_in_any_time_no_more_is_taken_than_a_bucket_and_what_refilled(per_minute, moves):
    bucket, now, taken = Bucket(per_minute, 0.0), 0.0, 0.0
    for pause, amount in moves:
        now += pause
        if not bucket.wait(amount, now):
            bucket.take(amount, now)
            taken += amount
            # one that is larger than the bucket overdraws it, and whoever comes next waits for it
            assert taken <= per_minute * (1 + now / 60) + max(amount - per_minute, 0) + 1e-6


@given(per_minute=st.integers(1, 10_000), used=st.integers(0, 20_000), amount=st.integers(1, 20_000))
def test_after_the_wait_that_is_told_it_may_be_taken(per_minute, used, amount):
    bucket = Bucket(per_minute, 0.0)
    bucket.take(used, 0.0)
    wait = bucket.wait(amount, 0.0)
    assert bucket.wait(amount, wait + 1e-6) == pytest.approx(0.0, abs=1e-6)
    if wait > 1e-3:
        assert bucket.wait(amount, wait * 0.99) > 0


def test_the_third_of_two_requests_a_minute_is_told_when_to_come_back():
    clock = Clock()
    meter = Meter(Limits(requests_per_minute=2), clock)
    meter.count_request()
    meter.count_request()
    with pytest.raises(ApiError) as caught:
        meter.count_request()
    assert caught.value.status == 429
    assert caught.value.code == "requests_limit_exceeded"
    assert caught.value.headers["Retry-After"] == "30"
    assert caught.value.headers["x-ratelimit-limit-requests"] == "2"
    assert caught.value.headers["x-ratelimit-remaining-requests"] == "0"
    assert caught.value.headers["x-ratelimit-reset-requests"] == "1m0s"
    clock.now += 30
    meter.count_request()


def test_tokens_of_answers_overdraw_the_minute_and_the_next_request_waits():
    clock = Clock()
    meter = Meter(Limits(tokens_per_minute=100), clock)
    meter.start(40)
    meter.end(120)  # 60 over
    with pytest.raises(ApiError) as caught:
        meter.start(10)
    assert "100 tokens a minute" in caught.value.message
    assert caught.value.headers["Retry-After"] == "42"
    assert caught.value.headers["x-ratelimit-remaining-tokens"] == "0"
    assert meter.num_running == 0
    clock.now += 42
    meter.start(10)


def test_a_prompt_larger_than_a_minute_goes_once_the_minute_is_whole():
    clock = Clock()
    meter = Meter(Limits(tokens_per_minute=100), clock)
    meter.start(1)
    with pytest.raises(ApiError):
        meter.start(1000)
    clock.now += 1
    meter.start(1000)


def test_no_more_run_at_a_time_than_may():
    meter = Meter(Limits(max_concurrent=2), Clock())
    meter.start(1)
    meter.start(1)
    with pytest.raises(ApiError) as caught:
        meter.start(1)
    assert "2 requests at a time" in caught.value.message
    assert caught.value.code == "concurrency_limit_exceeded"
    meter.end(0)
    meter.start(1)


def test_other_limits_take_effect_and_what_was_used_under_the_same_stays_used():
    meter = Meter(Limits(requests_per_minute=1, tokens_per_minute=10), Clock())
    meter.count_request()
    meter.start(10)
    meter.adopt(Limits(requests_per_minute=1, tokens_per_minute=20))
    with pytest.raises(ApiError):
        meter.count_request()
    meter.start(20)
    assert meter.num_running == 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.02, "20ms"), (1, "1s"), (59.2, "1m0s"), (60, "1m0s"), (361, "6m1s")],
)
def test_times_are_written_as_openai_writes_them(seconds, text):
    assert spoken(seconds) == text
