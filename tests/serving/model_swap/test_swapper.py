"""The swapper over admissions and runtimes that sleep and wake when a test says so."""

import asyncio

import pytest

from lamina.common.errors import EngineError, LoadError
from lamina.serving.errors import ApiError
from lamina.serving.model_swap.swapper import RETRY_SECONDS

from ..admission.books import Published
from .turns import serving, settle, with_


@serving
async def test_the_first_is_awake_and_nothing_is_swapped_before_another_is_asked(server):
    assert server.swapper.resident == ("a",)
    _, task = await server.ask("a")
    assert task.done()
    await server.advance(1000)
    assert server.log == []
    assert [server.models[name].metrics.is_resident for name in "abc"] == [True, False, False]


@serving
async def test_running_requests_end_before_another_model_takes_the_place(server):
    _, first = await server.ask("a")
    lease = first.result()
    lease.attach(Published("g"))
    _, other = await server.ask("b")
    _, late = await server.ask("a")
    assert server.swapper.standing("a") == "draining"
    assert (server.log, other.done(), late.done()) == ([], False, False)
    await server.end(first)
    assert server.log == ["a sleep 1", "b wake"]
    assert other.done()
    assert not late.done()
    await server.end(other)
    assert server.log[2:] == ["b sleep 1", "a wake"]
    assert late.done()
    assert server.models["b"].metrics.swap.count == 1
    assert server.models["a"].metrics.is_resident


@serving
@with_(min_residence=5.0, level=2)
async def test_one_that_was_woken_stays_for_its_minimum(server):
    _, other = await server.ask("b")  # who was awake at the start has no minimum
    await server.end(other)
    _, third = await server.ask("c")
    await server.advance(4.5)
    assert server.log == ["a sleep 2", "b wake"]
    _, more = await server.ask("b")
    assert more.done()
    await server.advance(0.5)
    assert server.swapper.standing("b") == "draining"
    await server.end(more)
    assert third.done()
    assert server.log[2:] == ["b sleep 2", "c wake"]


@serving
async def test_who_leaves_while_another_is_drained_for_it_is_not_waited_for(server):
    _, first = await server.ask("a")
    connection, other = await server.ask("b")
    _, late = await server.ask("a")
    assert not late.done()
    connection.gone.set()
    await settle()
    assert isinstance(other.exception(), ApiError)
    assert late.done()
    assert server.swapper.standing("a") == "resident"
    await server.end(first)
    assert server.log == []


@serving
@with_(drain_timeout=20.0)
async def test_what_runs_longer_than_a_drain_may_take_is_ended_by_an_error_that_says_so(server):
    _, first = await server.ask("a")
    _, other = await server.ask("b")
    await server.advance(19.0)
    assert server.log == []
    await server.advance(1.0)
    reason = "the model a makes room for another, and the request ran on for 20 s; ask again"
    assert server.log == [f"a fail: {reason}"]
    await server.advance(19.0)  # what does not end by that has as long again
    assert len(server.log) == 1
    assert not other.done()
    await server.end(first)
    assert server.log[1:] == ["a sleep 1", "b wake"]
    assert other.result()


@serving
@with_(min_residence=50.0)
async def test_who_would_wait_longer_than_he_may_for_a_model_that_sleeps_is_told_at_once(server):
    _, other = await server.ask("b")  # from now on b is awake
    await server.end(other)
    _, hasty = await server.ask("c", headers={"x-request-timeout": "30"})
    error = hasty.exception()
    assert (error.status, error.code, error.headers["Retry-After"]) == (429, "queue_full", "20")
    assert "would wait some 50s for its turn and may wait 30s" in error.message
    await server.advance(25.0)
    _, patient = await server.ask("c", headers={"x-request-timeout": "30"})
    assert not patient.done()
    await server.advance(25.0)
    assert patient.result()


@serving
async def test_nobody_is_refused_for_a_model_that_is_held_and_may_be_released_at_any_time(server):
    await server.swapper.hold("a", 1)
    _, waiting = await server.ask("a", headers={"x-request-timeout": "30"})
    assert not waiting.done()


@serving
async def test_requests_of_a_model_that_cannot_be_woken_are_refused_and_others_go_on(server):
    server.engines["b"].error = LoadError("the files are gone")
    _, refused = await server.ask("b")
    await settle()
    error = refused.exception()
    assert (error.status, error.code) == (503, "model_not_awake")
    assert error.message == "the model b could not be woken: the files are gone"
    assert "Retry-After" in error.headers
    assert server.log == ["a sleep 1", "b wake", "b sleep 1"]  # what it had taken is given back
    _, again = await server.ask("b")
    assert again.exception().message == error.message  # at once, so that nobody is drained for nothing
    _, other = await server.ask("a")
    assert other.done()
    assert server.log[3:] == ["a wake"]
    assert server.models["b"].metrics.num_failed_swaps == 1
    await server.end(other)
    server.engines["b"].error = None
    await server.advance(RETRY_SECONDS)
    _, served = await server.ask("b")
    assert served.result()
    assert server.log[4:] == ["a sleep 1", "b wake"]


@serving
async def test_a_model_that_cannot_be_put_to_sleep_goes_on_and_who_waited_is_told(server):
    server.engines["a"].error = EngineError("no room on the host")
    _, first = await server.ask("a")
    _, other = await server.ask("b")
    _, late = await server.ask("a")
    await server.end(first)
    assert other.exception().message == "the model b could not be woken: no room on the host"
    assert late.result()
    assert server.swapper.standing("a") == "resident"
    assert server.log == ["a sleep 1"]


@serving
async def test_the_place_of_a_lost_engine_is_another_s(server):
    server.engines["a"].error, server.engines["a"].is_alive = EngineError("gone"), False
    _, other = await server.ask("b")
    assert other.result()
    assert server.swapper.standing("a") == "failed"
    server.engines["c"].error, server.engines["c"].is_alive = EngineError("gone"), False
    await server.end(other)
    _, third = await server.ask("c")
    assert third.exception().message == "the model c could not be woken: gone"
    assert server.swapper.standing("c") == "failed"


@serving
async def test_a_model_that_is_lost_while_it_is_awake_makes_room(server):
    await server.ask("b")
    server.swapper.lose("b")
    await settle()
    _, third = await server.ask("c")
    assert third.result()
    with pytest.raises(ApiError) as caught:
        await server.swapper.release("b")
    assert caught.value.message == "the engine is lost"


@serving
async def test_a_model_put_to_sleep_by_hand_stays_so_until_it_is_released(server):
    _, first = await server.ask("a")
    await server.swapper.hold("a", 2)  # with a request under way, which goes on afterwards
    assert server.swapper.standing("a") == "asleep"
    _, waiting = await server.ask("a")
    _, other = await server.ask("b")
    assert other.result()
    await server.advance(1000)
    assert not waiting.done()
    assert server.log == ["a sleep 2", "b wake"]
    releasing = asyncio.ensure_future(server.swapper.release("a"))
    await settle()
    assert not releasing.done()  # b has work
    await server.end(other)
    await releasing
    assert server.log[2:] == ["b sleep 1", "a wake"]
    assert waiting.result()
    await server.end(first)


@serving
async def test_work_on_a_model_is_done_while_it_is_awake_and_nothing_swapped(server):
    working, may_end = asyncio.Event(), asyncio.Event()

    async def work():
        working.set()
        await may_end.wait()
        return server.swapper.resident

    using = asyncio.ensure_future(server.swapper.use("b", work))
    await working.wait()
    assert server.swapper.resident == ("b",)
    _, other = await server.ask("c")
    assert not other.done()
    may_end.set()
    assert await using == ("b",)
    await settle()
    assert other.result()
    await server.swapper.hold("b", 1)
    assert await server.swapper.use("b", work) == ("c",)  # asleep by hand, and left so


@serving
async def test_work_on_a_model_that_cannot_be_woken_is_refused(server):
    server.engines["b"].error = LoadError("the files are gone")
    with pytest.raises(ApiError) as caught:
        await server.swapper.release("b")
    assert caught.value.message == "the model b could not be woken: the files are gone"
    server.engines["b"].error = None
    await server.swapper.release("b")  # by hand it is tried again at once
    assert server.swapper.resident == ("b",)


@serving
@with_(max_resident=2)
async def test_models_that_fit_together_are_awake_together(server):
    assert server.swapper.resident == ("a", "b")
    _, first = await server.ask("a")
    _, second = await server.ask("b")
    assert first.result()
    assert second.result()
    await server.end(second)
    _, third = await server.ask("c")
    assert third.result()
    assert server.log == ["b sleep 1", "c wake"]
    assert server.swapper.resident == ("a", "c")


@serving
@with_(min_residence=500.0)
async def test_a_server_that_ends_waits_for_no_minimum(server):
    _, other = await server.ask("b")
    await server.end(other)
    _, back = await server.ask("a")
    assert not back.done()
    server.swapper.hurry()
    await settle()
    assert back.result()


@serving
@with_(not_loaded="bc")
async def test_a_model_is_loaded_in_its_turn_when_it_is_first_asked(server):
    assert [server.swapper.standing(name) for name in "abc"] == ["resident", "not_loaded", "not_loaded"]
    _, first = await server.ask("a")
    asking = [asyncio.ensure_future(server.swapper.load("b")) for _ in range(2)]
    await settle()
    with pytest.raises(ApiError) as caught:
        await server.swapper.load("b")
    assert (caught.value.status, caught.value.message) == (429, "too many requests wait until b is loaded")
    assert server.log == []
    await server.end(first)
    await asyncio.gather(*asking)
    assert server.log == ["a sleep 1", "b load"]
    _, second = await server.ask("b")
    assert second.result()
    _, back = await server.ask("a")
    await server.end(second)
    assert back.result()
    await server.end(back)
    await server.ask("b")
    assert server.log[2:] == ["b sleep 1", "a wake", "a sleep 1", "b wake"]


@serving
@with_(not_loaded="b")
async def test_one_that_cannot_be_loaded_is_tried_again_when_it_is_asked_later(server):
    server.engines["b"].error = LoadError("no such file")
    with pytest.raises(ApiError) as caught:
        await server.swapper.load("b")
    assert caught.value.message == "the model b could not be woken: no such file"
    assert server.swapper.standing("b") == "not_loaded"
    _, other = await server.ask("a")
    assert other.result()
    await server.end(other)
    server.engines["b"].error = None
    await server.advance(RETRY_SECONDS)
    await server.swapper.load("b")
    assert server.log == ["a sleep 1", "b load", "a wake", "a sleep 1", "b load"]


@serving
@with_(not_loaded="b")
async def test_one_that_is_not_loaded_may_be_held_and_released(server):
    await server.swapper.hold("b", 1)
    with pytest.raises(ApiError) as caught:
        await server.swapper.load("b")
    assert caught.value.message == "the model b is not loaded, and put to sleep by hand"
    await server.swapper.release("b")
    assert server.log == ["a sleep 1", "b load"]


@serving
async def test_it_ends_when_it_is_cancelled_just_as_something_changes(server):
    server.swapper._changed.set()
    server.running.cancel()  # close() waits for it
