"""From starting over ready to draining or failed."""

import asyncio

import pytest

from lamina.serving.errors import ApiError
from lamina.serving.lifecycle import Lifecycle


def test_requests_are_taken_once_ready_and_until_it_drains() -> None:
    lifecycle = Lifecycle()
    assert lifecycle.refusal() is not None
    lifecycle.ready()
    lifecycle.require_accepting()
    lifecycle.drain()
    with pytest.raises(ApiError) as refusal:
        lifecycle.require_accepting()
    assert refusal.value.status == 503
    assert refusal.value.headers["Connection"] == "close"
    assert int(refusal.value.headers["Retry-After"]) > 0
    lifecycle.ready()
    assert lifecycle.state == "draining"


def test_what_failed_stays_failed_and_says_why() -> None:
    lifecycle = Lifecycle()
    lifecycle.ready()
    lifecycle.fail("the engine is lost")
    lifecycle.drain()
    lifecycle.ready()
    refusal = lifecycle.refusal()
    assert lifecycle.state == "failed"
    assert refusal is not None
    assert refusal.message == "the engine is lost"


def test_it_is_drained_when_the_last_response_has_ended() -> None:
    async def run() -> None:
        lifecycle = Lifecycle()
        assert await lifecycle.wait_drained(0)
        with lifecycle.running(), lifecycle.running():
            assert not await lifecycle.wait_drained(0.01)
            waiting = asyncio.create_task(lifecycle.wait_drained(60))
        assert await waiting
        assert lifecycle.num_running == 0

    asyncio.run(run())
