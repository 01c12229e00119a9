"""A burst is begun in turns."""

import asyncio
import itertools

from lamina.serving.middleware.gate import NUM_AT_ONCE, Turns


def test_a_burst_passes_in_order_and_others_run_between() -> None:
    begun: list[int] = []
    seen: list[int] = []

    async def request(turns: Turns, number: int) -> None:
        await turns.wait()
        begun.append(number)

    async def look(tasks: list[asyncio.Task[None]]) -> None:
        while not all(task.done() for task in tasks):
            seen.append(len(begun))
            await asyncio.sleep(0)

    async def run() -> None:
        turns = Turns()
        tasks = [asyncio.create_task(request(turns, number)) for number in range(100)]
        await look(tasks)
        await asyncio.wait_for(request(turns, 100), 60)  # alone it waits for nobody

    asyncio.run(run())
    assert begun == list(range(101))
    gaps = [after - before for before, after in itertools.pairwise(seen)]
    assert 0 < max(gaps) <= NUM_AT_ONCE


def test_one_that_is_cancelled_while_it_waits_holds_nobody_up() -> None:
    async def run() -> int:
        turns = Turns()
        tasks = [asyncio.create_task(turns.wait()) for _ in range(50)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.wait(tasks, timeout=60)
        return sum(task.done() for task in tasks)

    assert asyncio.run(run()) == 50
