"""A burst of requests is begun in turns, so that the event loop looks after everybody else between them."""

import asyncio
from collections import deque

NUM_AT_ONCE = 8  # requests that begin before the loop comes round: some milliseconds of work


class Turns:
    """Lets NUM_AT_ONCE pass each time the event loop comes round, in the order in which they came."""

    def __init__(self) -> None:
        self._num_left = NUM_AT_ONCE
        self._is_scheduled = False  # whether the next turn is scheduled
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Returns when it is the caller's turn, which is at once unless there is a burst."""
        loop = asyncio.get_running_loop()
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._come_round)
        if self._num_left and not self._waiting:
            self._num_left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _come_round(self) -> None:
        self._num_left = NUM_AT_ONCE
        while self._waiting and self._num_left:
            turn = self._waiting.popleft()
            if not turn.done():  # such as one that was cancelled
                turn.set_result(None)
                self._num_left -= 1
        self._is_scheduled = bool(self._waiting)
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._come_round)
