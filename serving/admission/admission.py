"""Who may ask the engine now, who waits, and who is told to come later."""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...runtime.protocol.engine_output import EngineOutput
from ..auth.key import Key, key_of
from ..auth.keys import Keys
from ..auth.limits import Clock, retry_after, spoken
from ..config import ServeConfig
from ..errors import ApiError
from ..lifecycle import Lifecycle
from .connection import while_connected
from .lease import Lease, request_timeout
from .queue import FairQueue, Place
from .rate import Rate

if TYPE_CHECKING:
    from starlette.requests import Request

    from ...runtime.async_runtime import AsyncRuntime
    from ...runtime.engine.async_client import FinishedRequest

LONGEST_ADVICE = 60.0  # seconds of Retry-After where the measured rate would say more


class _Waiting(NamedTuple):
    """A request that waits for its turn."""

    place: Place
    turn: "asyncio.Future[None]"
    since: float


class Admission:
    """The queue before the engine, and what was admitted; it listens to the engine.

    The engine is given half as many sequences again as it computes at once, so that it never waits for one;
    the rest waits here, where keys take turns.
    """

    def __init__(
        self,
        config: ServeConfig,
        lifecycle: Lifecycle,
        keys: Keys,
        runtime: "AsyncRuntime",
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self._config, self._lifecycle, self._keys, self._runtime = config, lifecycle, keys, runtime
        self._clock = clock
        self._rate = Rate()
        self._queue = FairQueue()
        self._waiting: dict[Lease, _Waiting] = {}  # in the order in which they came
        self._at: dict[Place, Lease] = {}
        self._held: dict[Lease, int] = {}  # sequences of each that was admitted and have not ended
        self._num_held = 0
        self._numbers = itertools.count(1)
        self._by_request: dict[str, Lease] = {}
        self._is_paused = False
        self.on_change: Callable[[], None] | None = None  # called where a request waits, or gives slots back
        self.seconds_asleep: Callable[[], float | None] | None = None  # until resume(), as far as is known

    @property
    def max_num_seqs(self) -> int:
        """Sequences that are computed at once, by all engines that take requests."""
        return self._runtime.max_num_seqs

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._queue)

    @property
    def num_admitted(self) -> int:
        """Sequences that were admitted and have not ended."""
        return self._num_held

    @property
    def waiting_since(self) -> float | None:
        """When the request came that has waited longest, by the clock; None where none waits."""
        return next((each.since for each in self._waiting.values() if not each.turn.done()), None)

    def pause(self) -> None:
        """Admits nobody until resume(): who comes waits, within the same bounds; what runs goes on."""
        self._is_paused = True

    def resume(self) -> None:
        """Admits again, those that wait first."""
        self._is_paused = False
        self._let_in()

    async def admit(
        self,
        request: "Request",
        *,
        num_sequences: int,
        num_prompt_tokens: int,
        priority: int = 0,
        model: str | None = None,
    ) -> Lease:
        """Returns the request's lease once it is its turn.

        num_prompt_tokens: of all its prompts together. priority, model: as its client asked. Raises ApiError:
        400 or 403 for what never goes, 429 with Retry-After over a limit or where the wait would be too long,
        499 once the client has gone, 503 where the server takes nothing.
        """
        self._lifecycle.require_accepting()
        key = key_of(request)
        key.require_model(model or self._config.model_names[0])
        lease = Lease(
            number=next(self._numbers),
            key=key,
            priority=max(priority, key.entry.priority),
            num_sequences=num_sequences,
            deadline=self._clock() + request_timeout(request.headers),
            clock=self._clock,
        )
        lease.ids.add(request.scope["lamina.request_id"])
        key.meter.start(num_prompt_tokens)
        lease.on_release = lambda lease: self._released(lease, num_prompt_tokens)
        try:
            if self._queue or self._num_held >= self._most_held:
                await self._turn(request, lease)
            else:
                self._start(lease)
        except BaseException:
            lease.release()
            raise
        request.scope.setdefault("lamina.leases", []).append(lease)
        return lease

    def refuse_waiting(self, message: str, code: str | None = None) -> None:
        """Answers 503 to all that wait: the engine is lost or cannot be woken, or the server ends."""
        for waiting in list(self._waiting.values()):
            if not waiting.turn.done():
                error = ApiError(status=503, message=message, code=code, headers=retry_after(5))
                waiting.turn.set_exception(error)

    async def abort(self, key: Key, request_id: str) -> bool:
        """Ends what this key asked under this id, of request or response; False where nothing runs."""
        live = (*self._waiting, *(lease for lease, num_left in self._held.items() if num_left))
        mine = [each for each in live if request_id in each.ids and each.key.name == key.name]
        for lease in mine:
            lease.is_aborted = True
            if lease in self._waiting and not (turn := self._waiting[lease].turn).done():
                turn.set_exception(lease.aborted())
            for own_id in {generation.request_id for generation in lease.generations}:
                await self._runtime.abort(own_id)
        return bool(mine)

    def outputs(self, outputs: Sequence[EngineOutput], now: float) -> None:
        """Measures a step."""
        self._rate.step(outputs, now)

    def finished(self, request: "FinishedRequest") -> None:
        """Counts an answer that has ended: its slot is the next one's, though others of its request go on."""
        self._rate.answer(request.num_output_tokens)
        lease = self._by_request.get(request.request_id)
        if lease is not None and self._held.get(lease):
            self._give_back(lease, 1)

    @property
    def _most_held(self) -> int:
        if self._is_paused:
            return 0
        return self.max_num_seqs + max(self.max_num_seqs // 2, 1)

    def _start(self, lease: Lease) -> None:
        lease.on_attach = self._attached
        self._held[lease] = lease.num_sequences
        self._num_held += lease.num_sequences

    def _attached(self, lease: Lease, request_id: str) -> None:
        self._by_request[request_id] = lease

    def _give_back(self, lease: Lease, count: int) -> None:
        """Frees slots, and lets those in that wait for them."""
        self._held[lease] -= count
        self._num_held -= count
        self._let_in()
        if not self._num_held:
            self._rate.rest()
        self._tell_change()

    def _let_in(self) -> None:
        while self._queue and self._num_held < self._most_held:
            first = self._at.pop(self._queue.pop())
            turn = self._waiting.pop(first).turn
            self._start(first)
            if not turn.done():
                turn.set_result(None)

    def _tell_change(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _released(self, lease: Lease, num_prompt_tokens: int) -> None:
        if lease in self._held:
            lease.key.meter.end(lease.num_output_tokens)
            self._give_back(lease, self._held[lease])
            del self._held[lease]
        else:
            lease.key.meter.end(-num_prompt_tokens)  # it never came so far
            waiting = self._waiting.pop(lease, None)
            if waiting is not None:
                self._queue.remove(waiting.place)
                del self._at[waiting.place]
                self._tell_change()
        for generation in lease.generations:
            if self._by_request.get(generation.request_id) is lease:
                del self._by_request[generation.request_id]

    async def _turn(self, request: "Request", lease: Lease) -> None:
        """Waits until it is this request's turn; ApiError 429 where that takes too long."""
        place = self._queue.place(lease.key.name, lease.priority, lease.num_sequences)
        most = min(lease.timeout or float("inf"), self._config.max_queue_seconds)
        self._require_short(place, most)
        turn = asyncio.get_running_loop().create_future()
        self._queue.add(place)
        self._at[place], self._waiting[lease] = lease, _Waiting(place, turn, self._clock())
        self._tell_change()
        try:
            async with asyncio.timeout(most):
                await while_connected(request.receive, _result(turn))
        except TimeoutError:
            message = f"the request has waited {spoken(most)} for its turn, as long as it may"
            raise self._refusal(message, self._wait_at(place)) from None

    def _require_short(self, place: Place, most: float) -> None:
        """ApiError 429 where the queue is full, this key has its share of it, or the wait would be longer."""
        free = self._config.max_waiting - len(self._queue)
        wait = self._wait_at(place)
        if free <= 0:
            raise self._refusal("too many requests wait", wait)
        if len(self._keys.names) > 1 and self._queue.num_of(place.owner) >= free:
            raise self._refusal("too many requests of this key wait", wait)
        if wait is not None and wait > most:
            message = f"the request would wait some {spoken(wait)} for its turn and may wait {spoken(most)}"
            raise self._refusal(message, wait - most)

    def _wait_at(self, place: Place) -> float | None:
        """Returns the seconds after which the engine computes what has this place, as far as is known."""
        engine_queue = max(self._num_held - self.max_num_seqs, 0)
        computed = self._rate.seconds_for(self._queue.size_before(place) + engine_queue + 1)
        asleep = self.seconds_asleep() if self._is_paused and self.seconds_asleep is not None else None
        return computed if asleep is None else asleep + (computed or 0.0)

    def _refusal(self, message: str, wait: float | None) -> ApiError:
        headers = retry_after(min(wait or 1.0, LONGEST_ADVICE))
        return ApiError(status=429, message=message, code="queue_full", headers=headers)


async def _result(turn: "asyncio.Future[None]") -> None:
    await turn
