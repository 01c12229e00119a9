"""Which of several models is awake: it asks the policy whenever something changes, and does what it says."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NoReturn, TypeVar

from ...common.errors import DrainedError, LaminaError
from ...common.logging import get_logger
from ..admission.admission import Admission
from ..auth.limits import Clock, retry_after
from ..context import Serving
from ..errors import ApiError, api_error
from .policy import Action, Drain, EndRunning, ModelState, Rest, Resume, Swap, SwapPolicy

logger = get_logger("serving")
T = TypeVar("T")
RETRY_SECONDS = 5.0  # after which a model that could not be woken is tried again
CODE = "model_not_awake"


class Swapper:
    """Drains, puts to sleep and wakes the models of one server; used in its event loop alone.

    A model that sleeps has its requests wait in its own admission. What is done by hand, and a swap, exclude
    each other.
    """

    def __init__(
        self,
        models: Mapping[str, Serving],
        policy: SwapPolicy,
        *,
        level: int = 1,
        load: Callable[[Serving], Awaitable[object]] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """models: by their first names; as many as may be resident are awake, the rest sleeps.

        level: how deeply models sleep, as AsyncRuntime.sleep() has it. load: loads one that is not loaded,
        awake; of those that may be resident at first all are.
        """
        self._models, self._policy, self._level, self._clock = dict(models), policy, level, clock
        self._load_model = load
        self._resident: dict[str, float] = dict.fromkeys(list(models)[: policy.max_resident], float("-inf"))
        self._left_at: dict[str, float] = {}
        self._draining: str | None = None
        self._draining_since = 0.0
        self._held: set[str] = set()  # those that were put to sleep by hand
        self._lost: set[str] = set()  # those whose engine is no more
        self._failed: dict[str, tuple[float, str]] = {}  # until when a model is not tried again, and why
        self._wanted: dict[str, list[float]] = {name: [] for name in models}  # since when, by hand
        self._changed = asyncio.Event()
        self._turn = asyncio.Condition()
        for name, serving in self._models.items():
            serving.metrics.is_resident = name in self._resident
            if serving.loaded is not None:
                self._connect(name, serving.admission)

    @property
    def resident(self) -> tuple[str, ...]:
        """The models that are awake, the one that was woken last at the end."""
        return tuple(self._resident)

    def standing(self, name: str) -> str:
        """Returns where a model stands: resident, draining, waiting for its turn, asleep by hand, or lost."""
        if name in self._lost:
            return "failed"
        if name in self._held:
            return "asleep"
        if self._models[name].loaded is None:
            return "not_loaded"
        if name in self._resident:
            return "draining" if name == self._draining else "resident"
        return "swapped_out"

    async def run(self) -> NoReturn:
        """Swaps as the policy says, until it is cancelled."""
        while True:
            self._changed.clear()
            async with self._turn:
                action = await self._act()
                self._turn.notify_all()
            if isinstance(action, Rest):
                until = [end for end, _ in self._failed.values()]
                until += [] if action.until is None else [action.until]
                await self._wait_change(min(until, default=None))

    def hurry(self) -> None:
        """From now on no model stays for a minimum time: the server ends, and nobody new will ask."""
        self._policy = replace(self._policy, min_residence=0.0)
        self._changed.set()

    def seconds_until(self, name: str) -> float | None:
        """Returns in how many seconds a model takes requests, at the soonest; None where nobody knows."""
        books = {each: serving.metrics.swap for each, serving in self._models.items()}
        seconds = {each: swap.sum / swap.count if swap.count else 0.0 for each, swap in books.items()}
        return self._policy.seconds_until(name, self._states(), self._clock(), seconds)

    def lose(self, name: str) -> None:
        """Leaves a model out whose engine is no more; its place is another's."""
        self._lost.add(name)
        self._leave(name)
        self._changed.set()

    async def hold(self, name: str, level: int) -> None:
        """Puts a model to sleep until release(), whether or not it has requests, which wait."""
        async with self._turn:
            serving = self._models[name]
            if serving.loaded is not None:
                serving.admission.pause()
                try:
                    await serving.runtime.sleep(level)
                except Exception:
                    if name in self._resident and name != self._draining:
                        serving.admission.resume()
                    raise
            self._held.add(name)
            self._leave(name)
        self._changed.set()

    async def release(self, name: str) -> None:
        """Has a model woken in its turn, and returns once it is; ApiError 503 where that fails."""
        self._held.discard(name)
        self._failed.pop(name, None)
        await self.use(name, _nothing)

    async def use(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        """Returns what the work returns, done in the model's turn, in which nothing is swapped.

        A model that is asleep by hand is left so. Raises ApiError 503 where it cannot be woken.
        """
        since = self._clock()
        self._wanted[name].append(since)
        self._changed.set()
        try:
            async with self._turn:
                await self._turn.wait_for(lambda: self._is_settled(name))
                if name not in self._held and name not in self._resident:
                    raise ApiError(status=503, message=self._why_not(name), code=CODE)
                return await work()
        finally:
            self._wanted[name].remove(since)
            self._changed.set()

    async def load(self, name: str) -> None:
        """Returns once a model is loaded, in its turn; ApiError 503 where it cannot be, or is held.

        429 where too many wait for that already.
        """
        serving = self._models[name]
        if len(self._wanted[name]) >= serving.config.max_waiting:
            message = f"too many requests wait until {name} is loaded"
            raise ApiError(status=429, message=message, code="queue_full", headers=retry_after(5))
        await self.use(name, _nothing)
        if serving.loaded is None:
            message = f"the model {name} is not loaded, and put to sleep by hand"
            raise ApiError(status=503, message=message, code=CODE, headers=retry_after(5))

    def _connect(self, name: str, admission: Admission) -> None:
        """Has a model's queue wait while it sleeps, and say what changes."""
        admission.on_change = self._changed.set
        admission.seconds_asleep = partial(self.seconds_until, name)
        if name not in self._resident:
            admission.pause()

    def _is_settled(self, name: str) -> bool:
        return any(name in those for those in (self._held, self._resident, self._failed, self._lost))

    def _why_not(self, name: str) -> str:
        return "the engine is lost" if name in self._lost else self._failed[name][1]

    async def _wait_change(self, until: float | None) -> None:
        timeout = None if until is None else max(until - self._clock(), 0.0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):  # wait_for() may take a cancellation for an end
                await self._changed.wait()

    async def _act(self) -> Action:
        now = self._clock()
        self._refuse_failed(now)
        action = self._policy.decide(self._states(), now)
        match action:
            case Drain():
                self._draining, self._draining_since = action.model, now
                self._models[action.model].admission.pause()
            case EndRunning():
                self._end_running(action.model, now)
            case Resume():
                self._draining = None
                self._models[action.model].admission.resume()
            case Swap():
                await self._swap(action, now)
        return action

    def _end_running(self, name: str, now: float) -> None:
        """Ends what runs of a model by an error; whatever begins even so has as long again."""
        seconds, self._draining_since = now - self._draining_since, now
        admission = self._models[name].admission
        logger.warning("%d sequences of %s are ended, as it makes room", admission.num_admitted, name)
        reason = f"the model {name} makes room for another, and the request ran on for {seconds:.3g} s"
        self._models[name].runtime.fail(DrainedError(f"{reason}; ask again"))

    def _states(self) -> dict[str, ModelState]:
        return {name: self._state(name) for name in self._models}

    def _state(self, name: str) -> ModelState:
        loaded, waiting = self._models[name].loaded, self._wanted[name][:1]
        if loaded is not None and (since := loaded.admission.waiting_since) is not None:
            waiting.append(since)
        return ModelState(
            resident_since=self._resident.get(name),
            left_at=self._left_at.get(name, float("-inf")),
            waiting_since=min(waiting, default=None),
            num_running=0 if loaded is None else loaded.admission.num_admitted,
            draining_since=self._draining_since if name == self._draining else None,
            is_available=not any(name in those for those in (self._held, self._lost, self._failed)),
        )

    async def _swap(self, action: Swap, started: float) -> None:
        """Puts one to sleep and wakes the other; whoever waits hears why either fails."""
        out, into = action.out, self._models[action.into]
        try:
            if out is not None:
                await self._put_to_sleep(out)
            await self._wake(action.into)
        except Exception as error:
            self._fail(action.into, error)
            return
        seconds = self._clock() - started
        into.metrics.swap.observe(seconds)
        logger.info("%s is awake after %.2f s, in place of %s", action.into, seconds, out or "none")

    def _fail(self, name: str, error: Exception) -> None:
        """Tells who waits for a model that it could not be woken; it is tried again, unless it is lost."""
        serving = self._models[name]
        serving.metrics.num_failed_swaps += 1
        reason = f"the model {name} could not be woken: {api_error(error).message}"
        logger.error("%s", reason, exc_info=None if isinstance(error, LaminaError) else error)
        self._failed[name] = self._clock() + RETRY_SECONDS, reason
        self._refuse_failed(self._clock())
        if serving.loaded is not None and not serving.runtime.health().status.is_alive:
            self.lose(name)

    async def _put_to_sleep(self, name: str) -> None:
        runtime = self._models[name].runtime
        try:
            await runtime.sleep(self._level)
        except Exception:
            if not runtime.health().status.is_alive:
                self.lose(name)
                return
            self._draining, self._resident[name] = None, self._clock()  # it goes on, for its minimum at least
            self._models[name].admission.resume()
            raise
        self._leave(name)

    async def _wake(self, name: str) -> None:
        serving = self._models[name]
        if serving.loaded is None:
            assert self._load_model is not None, "a model that is not loaded, and nobody to load it"
            await self._load_model(serving)
            self._connect(name, serving.admission)
        else:
            await self._wake_loaded(serving)
        self._resident[name] = self._clock()
        serving.metrics.is_resident = True
        serving.admission.resume()

    async def _wake_loaded(self, serving: Serving) -> None:
        try:
            await serving.runtime.wake()
        except Exception:
            with contextlib.suppress(Exception):  # what it has taken by then is another's
                await serving.runtime.sleep(self._level)
            raise

    def _leave(self, name: str) -> None:
        """Notes that a model is resident no more."""
        if self._resident.pop(name, None) is not None:
            self._left_at[name] = self._clock()
        if self._draining == name:
            self._draining = None
        self._models[name].metrics.is_resident = False

    def _refuse_failed(self, now: float) -> None:
        """Answers who waits for a model that could not be woken just now; later it is tried again."""
        self._failed = {name: (end, why) for name, (end, why) in self._failed.items() if end > now}
        for name, (_, why) in self._failed.items():
            if (loaded := self._models[name].loaded) is not None:
                loaded.admission.refuse_waiting(why, CODE)


async def _nothing() -> None:
    pass
