"""The innermost layer: whether requests are taken, and a burst of them in turns."""

import asyncio
from collections import deque
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from ..auth.authentication import route_path
from ..lifecycle import Lifecycle

ALWAYS = ("/health", "/health/live", "/health/ready", "/metrics")  # they say themselves how things stand
NUM_AT_ONCE = 8  # requests that begin before the loop comes round: some milliseconds of work


class Gate:
    """Answers 503 with the reason unless requests are taken; begins them in turns, and counts them."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, always: Iterable[str] = ()) -> None:
        """always: further paths that are answered whatever the state."""
        self.app = app
        self.lifecycle = lifecycle
        self.always = {*ALWAYS, *always}
        self.turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if route_path(scope) in self.always:
            await self.app(scope, receive, send)
            return
        self.lifecycle.require_accepting()
        with self.lifecycle.running():
            await self.turns.wait()
            await self.app(scope, receive, send)


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
