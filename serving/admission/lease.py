"""What an admitted request holds until it ends: its sequences' slots and its key's allowance."""

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ..auth.key import Key
from ..errors import ApiError

if TYPE_CHECKING:
    from starlette.datastructures import Headers
    from starlette.types import ASGIApp, Receive, Scope, Send

TIMEOUT_HEADER = "x-request-timeout"
MAX_TIMEOUT = 86400.0


class Generating(Protocol):
    """What a lease needs of a Generation."""

    @property
    def request_id(self) -> str:
        """The id under which the runtime knows it."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens published so far, of all its answers."""

    async def aclose(self) -> None:
        """End it within a step; harmless once it has ended."""


class Lease:
    """One request's part of the engine. Whoever was given it releases it, however the request ends."""

    def __init__(
        self,
        *,
        number: int,
        key: Key,
        priority: int,
        num_sequences: int,
        deadline: float,
        clock: Callable[[], float],
    ) -> None:
        self.number = number  # unlike that of any other
        self.key = key
        self.priority = priority  # what the engine is to be asked with, lower first
        self.num_sequences = num_sequences
        self.ids: set[str] = set()  # by which its client may abort it
        self.generations: list[Generating] = []
        self.is_aborted = False  # by its client, perhaps before it has any generation
        self.on_attach: Callable[[Lease, str], None] | None = None
        self.on_release: Callable[[Lease], None] | None = None  # called once
        self._deadline = deadline
        self._clock = clock

    @property
    def has_timeout(self) -> bool:
        """Whether its client gave it a time."""
        return not math.isinf(self._deadline)

    @property
    def timeout(self) -> float | None:
        """Seconds left of the client's x-request-timeout, above 0; None where it gave none."""
        return max(self._deadline - self._clock(), 1e-3) if self.has_timeout else None

    @property
    def num_output_tokens(self) -> int:
        """Tokens that its generations have published."""
        return sum(generation.num_output_tokens for generation in self.generations)

    def late(self) -> ApiError:
        """Returns what a client is answered whose time has passed."""
        message = f"the request was not done in the time of its {TIMEOUT_HEADER}"
        return ApiError(status=408, message=message, param=TIMEOUT_HEADER, code="timeout")

    def aborted(self) -> ApiError:
        """Returns what a client is answered whose request was aborted before it was all begun."""
        return ApiError(status=499, message="the request was aborted", code="aborted")

    def attach(self, generation: Generating, response_id: str | None = None) -> None:
        """Has a generation counted, ended with the request, and found by the response's id for an abort.

        Raises ApiError 499 where the request has been aborted meanwhile.
        """
        self.generations.append(generation)
        self.ids.add(response_id or generation.request_id)
        if self.on_attach is not None:
            self.on_attach(self, generation.request_id)
        if self.is_aborted:
            raise self.aborted()

    def release(self) -> None:
        """Gives everything back; a second call does nothing."""
        on_release, self.on_release = self.on_release, None
        if on_release is not None:
            on_release(self)

    async def aclose(self) -> None:
        """Ends its generations, and releases it."""
        try:
            for generation in self.generations:
                await generation.aclose()
        finally:
            self.release()


class Leases:
    """ASGI middleware that ends the generations of a request and releases its leases once it is answered."""

    def __init__(self, app: "ASGIApp") -> None:
        self._app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Serves the request; what admit() grants meanwhile stands in scope["lamina.leases"]."""
        leases: list[Lease] = []
        scope["lamina.leases"] = leases
        try:
            await self._app(scope, receive, send)
        finally:
            if leases:
                await asyncio.gather(*(lease.aclose() for lease in leases), return_exceptions=True)
                leases.clear()  # the scope stays with its connection until the next request


def request_timeout(headers: "Headers") -> float:
    """Returns the seconds of x-request-timeout, infinite without it; ApiError 400 for what is no time."""
    given = headers.get(TIMEOUT_HEADER)
    if given is None:
        return math.inf
    try:
        seconds = float(given if "_" not in given else "")  # Python alone has 1_000
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT:
        message = f"{TIMEOUT_HEADER} is {given[:40]!r}; wanted seconds, above 0, at most {MAX_TIMEOUT:.0f}"
        raise ApiError(status=400, message=message, param=TIMEOUT_HEADER)
    return seconds
