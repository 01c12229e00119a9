"""Work ends with the client that asked for it, and nothing of it goes on unseen."""

import asyncio
import contextlib
import gc
import weakref

import pytest

from lamina.serving.admission.connection import while_connected
from lamina.serving.errors import ApiError


class Line:
    """A client's connection, whose end may come."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def long_work(ended: list[str]) -> str:
    try:
        await asyncio.sleep(3600)
    finally:
        await asyncio.sleep(0)  # what it gives back may take a moment
        ended.append("work")
    return "done"


async def only_this_task_is_left() -> bool:
    await asyncio.sleep(0)
    return asyncio.all_tasks() == {asyncio.current_task()}


def test_what_the_work_returns_or_raises_comes_back():
    async def fails() -> None:
        raise ValueError("mine")

    async def scenario() -> None:
        assert await while_connected(Line().receive, asyncio.sleep(0, "done")) == "done"
        with pytest.raises(ValueError, match="mine"):
            await while_connected(Line().receive, fails())
        assert await only_this_task_is_left()

    asyncio.run(scenario())


def test_a_client_that_goes_ends_the_work_before_the_error_is_raised():
    async def scenario() -> None:
        line, ended = Line(), []
        asyncio.get_running_loop().call_later(0.01, line.gone.set)
        with pytest.raises(ApiError) as caught:
            await while_connected(line.receive, long_work(ended))
        assert (caught.value.status, ended) == (499, ["work"])
        assert await only_this_task_is_left()

    asyncio.run(scenario())


def test_work_that_is_done_as_the_client_goes_counts():
    async def scenario() -> None:
        line = Line()
        line.gone.set()
        assert await while_connected(line.receive, asyncio.sleep(0, "done")) == "done"

    asyncio.run(scenario())


@pytest.mark.parametrize("num_turns", range(1, 5))
def test_to_cancel_the_caller_ends_the_work_and_waits_for_it(num_turns):
    async def scenario() -> None:
        ended: list[str] = []
        task = asyncio.ensure_future(while_connected(Line().receive, long_work(ended)))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["work"]
        assert await only_this_task_is_left()

    asyncio.run(scenario())
    gc.collect()  # a coroutine that was never awaited, or an error nobody saw, is a warning and so an error


def test_an_error_of_the_connection_or_of_ended_work_is_nobodys_loose_end():
    async def broken():
        raise OSError("the line is broken")

    async def stubborn() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            raise ValueError("on its way out")

    async def scenario() -> list[object]:
        loose: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: loose.append(context))
        with pytest.raises(ApiError):
            await while_connected(broken, stubborn())
        gc.collect()
        await asyncio.sleep(0)
        return loose

    assert asyncio.run(scenario()) == []


def test_an_error_of_the_work_holds_nothing_once_it_was_dealt_with() -> None:
    class Held:
        pass

    async def run() -> None:
        held = Held()
        reference = weakref.ref(held)

        async def fails(held: Held) -> None:
            raise ValueError(held)

        work = fails(held)
        del held
        with contextlib.suppress(ValueError):
            await while_connected(Line().receive, work)
        del work
        assert reference() is None

    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()
