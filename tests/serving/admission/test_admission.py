"""Who is admitted, who waits, who is refused, and that nothing is left of who has gone."""

import asyncio
from types import SimpleNamespace

import pytest

from lamina.runtime.protocol.engine_output import EngineOutput
from lamina.serving.errors import ApiError

from .books import Clock, Connection, Published, admission, ask, is_empty, key, settle


def refusal(coroutine) -> ApiError:
    with pytest.raises(ApiError) as caught:
        asyncio.run(coroutine)
    return caught.value


def test_what_has_no_room_waits_until_there_is():
    async def scenario():
        books = admission(max_num_seqs=2)
        leases = [await ask(books, Connection(key())) for _ in range(3)]
        waiting = asyncio.ensure_future(ask(books, Connection(key())))
        await settle()
        assert not waiting.done()
        assert books.num_waiting == 1
        leases[0].release()
        leases[0].release()  # harmless
        leases[1].release()
        last = await waiting
        assert books.num_admitted == 2
        for lease in (leases[2], last):
            lease.release()
        assert is_empty(books)

    asyncio.run(scenario())


def test_an_answer_that_ends_makes_room_while_others_of_its_request_go_on():
    async def scenario():
        books = admission(max_num_seqs=2)
        lease = await ask(books, Connection(key()), num_sequences=3)
        lease.attach(Published("r"))
        waiting = asyncio.ensure_future(ask(books, Connection(key())))
        await settle()
        books.finished(SimpleNamespace(request_id="r", num_output_tokens=5))
        second = await waiting
        assert books.num_admitted == 3
        lease.release()
        second.release()
        assert is_empty(books)

    asyncio.run(scenario())


def test_what_is_aborted_before_it_is_begun_ends_as_it_begins():
    async def scenario():
        books, own = admission(max_num_seqs=2), key()
        lease = await ask(books, Connection(own, request_id="mine"))
        assert await books.abort(own, "mine")
        generation = Published("r")
        with pytest.raises(ApiError) as caught:
            lease.attach(generation)
        assert (caught.value.status, caught.value.code) == (499, "aborted")
        await lease.aclose()
        assert generation.num_closed == 1
        assert is_empty(books)

    asyncio.run(scenario())


def test_who_is_aborted_as_it_gets_its_turn_ends_as_it_begins():
    async def scenario():
        books, own = admission(max_num_seqs=1), key()
        running = [await ask(books, Connection(own)) for _ in range(2)]
        waiting = asyncio.ensure_future(ask(books, Connection(own, request_id="mine")))
        await settle()
        running[0].release()  # its turn, of which its task has not heard
        assert await books.abort(own, "mine")
        lease = await waiting
        with pytest.raises(ApiError) as caught:
            lease.attach(Published("r"))
        assert (caught.value.status, caught.value.code) == (499, "aborted")
        for each in (lease, running[1]):
            each.release()
        assert is_empty(books)

    asyncio.run(scenario())


def test_what_has_ended_is_not_aborted_though_its_answer_is_being_sent():
    async def scenario():
        books, own = admission(max_num_seqs=2), key()
        lease = await ask(books, Connection(own, request_id="mine"), num_sequences=2)
        lease.attach(Published("r"))
        done = SimpleNamespace(request_id="r", num_output_tokens=5)
        books.finished(done)
        assert not await books.abort(key("b"), "mine")
        assert await books.abort(own, "mine")
        books.finished(done)
        assert not await books.abort(own, "mine")
        lease.release()
        assert is_empty(books)

    asyncio.run(scenario())


def test_a_key_that_floods_leaves_the_next_turn_to_another():
    async def scenario():
        books = admission(max_num_seqs=2)
        running = [await ask(books, Connection(key("a"))) for _ in range(3)]
        order = []

        async def enter(name):
            order.append((name, await ask(books, Connection(keys[name]))))

        keys = {"a": key("a"), "b": key("b")}
        tasks = [asyncio.ensure_future(enter("a")) for _ in range(20)]
        await settle()
        tasks.append(asyncio.ensure_future(enter("b")))
        await settle()
        running[0].release()
        running[1].release()
        await settle()
        assert "b" in [name for name, _ in order]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for lease in (running[2], *(lease for _, lease in order)):
            lease.release()
        assert is_empty(books)

    asyncio.run(scenario())


def test_one_key_cannot_fill_the_queue():
    async def scenario():
        books = admission(max_num_seqs=1, max_waiting=10)
        for _ in range(2):
            await ask(books, Connection(key("a")))
        tasks = [asyncio.ensure_future(ask(books, Connection(key("a")))) for _ in range(10)]
        await settle()
        refused = [task for task in tasks if task.done()]
        assert len(refused) == 5
        assert books.num_waiting == 5
        error = refused[0].exception()
        assert (error.status, error.code) == (429, "queue_full")
        assert int(error.headers["Retry-After"]) >= 1
        other = asyncio.ensure_future(ask(books, Connection(key("b"))))
        await settle()
        assert not other.done()
        assert books.num_waiting == 6
        for task in (*tasks, other):
            task.cancel()
        await asyncio.gather(*tasks, other, return_exceptions=True)

    asyncio.run(scenario())


def test_a_single_key_may_fill_the_queue_and_no_more():
    async def scenario():
        books = admission(max_num_seqs=1, max_waiting=3, keys=())
        for _ in range(2):
            await ask(books, Connection(key()))
        tasks = [asyncio.ensure_future(ask(books, Connection(key()))) for _ in range(5)]
        await settle()
        assert sum(task.done() for task in tasks) == 2
        assert books.num_waiting == 3
        for task in tasks:
            task.cancel()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [error.status for error in errors if isinstance(error, ApiError)] == [429, 429]

    asyncio.run(scenario())


def test_a_wait_longer_than_the_client_allows_is_refused_at_once_by_the_measured_rate():
    async def scenario():
        books = admission(max_num_seqs=1)
        for _ in range(2):
            await ask(books, Connection(key()))
        for step in range(20):  # ten tokens a second, of answers with a hundred
            books.outputs([EngineOutput(request_id="r", num_before=0, new_token_ids=(1,))], 0.1 * step)
        books.finished(SimpleNamespace(request_id="other", num_output_tokens=100))
        with pytest.raises(ApiError) as caught:
            await ask(books, Connection(key(), {"X-Request-Timeout": "5"}))
        error = caught.value
        assert error.status == 429
        assert "may wait 5s" in error.message
        assert "20s" in error.message
        assert error.headers["Retry-After"] == "15"
        assert books.num_waiting == 0
        patient = asyncio.ensure_future(ask(books, Connection(key(), {"X-Request-Timeout": "30"})))
        await settle()
        assert books.num_waiting == 1
        patient.cancel()
        await asyncio.wait((patient,))

    asyncio.run(scenario())


def test_time_without_work_is_no_part_of_the_rate():
    async def scenario():
        books = admission()
        for begin in (0.0, 1000.0):
            lease = await ask(books, Connection(key()))
            for step in range(11):
                books.outputs([EngineOutput(request_id="r", num_before=0, new_token_ids=(1,))], begin + step)
            lease.release()
        assert books._rate.tokens_per_second == pytest.approx(1.0)

    asyncio.run(scenario())


def test_who_has_waited_as_long_as_allowed_is_refused():
    async def scenario():
        books = admission(max_num_seqs=1, max_queue_seconds=0.05)
        running = [await ask(books, Connection(key())) for _ in range(2)]
        with pytest.raises(ApiError) as caught:
            await ask(books, Connection(key()))
        assert caught.value.status == 429
        assert "has waited" in caught.value.message
        for lease in running:
            lease.release()
        assert is_empty(books)

    asyncio.run(scenario())


def test_who_goes_away_while_waiting_gives_the_place_up():
    async def scenario():
        books, mine = admission(max_num_seqs=1), key(max_concurrent=5, tokens_per_minute=100)
        running = [await ask(books, Connection(mine)) for _ in range(2)]
        connection = Connection(mine)
        waiting = asyncio.ensure_future(ask(books, connection, num_prompt_tokens=50))
        await settle()
        connection.gone.set()
        with pytest.raises(ApiError) as caught:
            await waiting
        assert caught.value.status == 499
        assert books.num_waiting == 0
        assert mine.meter.num_running == 2
        assert mine.meter.headers()["x-ratelimit-remaining-tokens"] == "98"  # it was never computed
        for lease in running:
            lease.release()
        assert is_empty(books)

    asyncio.run(scenario())


@pytest.mark.parametrize("num_turns", range(6))
def test_room_for_one_who_is_just_being_cancelled_goes_to_the_next(num_turns):
    async def scenario():
        books = admission(max_num_seqs=1)
        running = [await ask(books, Connection(key())) for _ in range(2)]
        first, second = (asyncio.ensure_future(ask(books, Connection(key()))) for _ in range(2))
        await settle()
        first.cancel()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        running[0].release()
        (await second).release()
        with pytest.raises(asyncio.CancelledError):
            await first
        running[1].release()
        assert is_empty(books)

    asyncio.run(scenario())


def test_who_waits_is_told_when_the_server_ends():
    async def scenario():
        books = admission(max_num_seqs=1)
        for _ in range(2):
            await ask(books, Connection(key()))
        waiting = asyncio.ensure_future(ask(books, Connection(key())))
        await settle()
        books.refuse_waiting("the engine is lost")
        with pytest.raises(ApiError) as caught:
            await waiting
        assert (caught.value.status, caught.value.message) == (503, "the engine is lost")
        assert "Retry-After" in caught.value.headers
        assert books.num_waiting == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "timeout", ["", "soon", "0", "-1", "nan", "inf", "1e9", "1,5", "1_0", "٣", "1" * 5000]
)
def test_a_timeout_that_is_no_time_is_refused_by_name(timeout):
    connection = Connection(key())
    connection.request.scope["headers"] = [(b"x-request-timeout", timeout.encode())]
    error = refusal(ask(admission(), connection))
    assert (error.status, error.param) == (400, "x-request-timeout")


def test_the_time_that_a_request_has_left_counts_from_its_arrival():
    async def scenario():
        clock = Clock()
        books = admission(clock=clock)
        lease = await ask(books, Connection(key(), {"x-request-timeout": "2.5"}))
        clock.now += 1
        assert lease.timeout == pytest.approx(1.5)
        clock.now += 10
        assert 0 < lease.timeout < 0.01
        assert (await ask(books, Connection(key()))).timeout is None

    asyncio.run(scenario())


def test_a_request_may_be_less_urgent_than_its_key_and_not_more():
    async def scenario():
        books = admission(max_num_seqs=50)
        mine = key(priority=2)
        asked = [await ask(books, Connection(mine), priority=priority) for priority in (-5, 0, 2, 7)]
        assert [lease.priority for lease in asked] == [2, 2, 2, 7]

    asyncio.run(scenario())


def test_other_models_are_refused_before_anything_is_counted():
    mine = key(models=("small",), tokens_per_minute=10)
    books = admission()
    assert refusal(ask(books, Connection(mine))).status == 403
    assert refusal(ask(books, Connection(mine), model="large")).status == 403
    assert mine.meter.num_running == 0
    assert is_empty(books)
    assert mine.meter.headers()["x-ratelimit-remaining-tokens"] == "10"


def test_tokens_of_prompt_and_answer_are_charged_to_the_key():
    async def scenario():
        books, mine = admission(), key(tokens_per_minute=100, max_concurrent=1)
        lease = await ask(books, Connection(mine), num_prompt_tokens=30)
        assert mine.meter.headers()["x-ratelimit-remaining-tokens"] == "70"
        with pytest.raises(ApiError) as caught:
            await ask(books, Connection(mine))
        assert caught.value.code == "concurrency_limit_exceeded"
        generation = Published("r", num_output_tokens=25)
        lease.attach(generation)
        await lease.aclose()
        assert generation.num_closed == 1
        assert mine.meter.num_running == 0
        assert mine.meter.headers()["x-ratelimit-remaining-tokens"] == "45"

    asyncio.run(scenario())
