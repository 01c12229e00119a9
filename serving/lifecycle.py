"""Whether a server takes requests: from starting over ready to draining, or failed."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from .errors import ApiError

if TYPE_CHECKING:
    from ..runtime.protocol.core_messages import CoreStatus

State = Literal["starting", "ready", "draining", "failed"]
RETRY_AFTER = {"starting": "2", "draining": "10", "failed": "10"}  # seconds


class Lifecycle:
    """Where a server stands, why, and how many responses are under way; used in the event loop alone."""

    def __init__(self) -> None:
        self.state: State = "starting"
        self.reason: str | None = "the model is loading"
        self.num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def ready(self) -> None:
        """From now on requests are taken, unless the server drains already."""
        if self.state == "starting":
            self.state, self.reason = "ready", None

    def drain(self) -> None:
        """From now on new requests are refused; running ones go on."""
        if self.state != "failed":
            self.state, self.reason = "draining", "the server is shutting down"

    def fail(self, reason: str) -> None:
        """From now on requests are refused for a reason; restart() alone leads back."""
        self.state, self.reason = "failed", reason

    def restart(self) -> None:
        """What has failed is loaded anew; requests are refused until it is ready."""
        self.state, self.reason = "starting", "the engine was lost, and the model is loaded again"

    def refusal(self) -> ApiError | None:
        """Returns what a new request is answered now; None where it is taken."""
        if self.state == "ready":
            return None
        headers = {"Retry-After": RETRY_AFTER[self.state], "Connection": "close"}
        if self.state == "starting":
            del headers["Connection"]
        return ApiError(status=503, message=str(self.reason), code=self.state, headers=headers)

    def require_accepting(self) -> None:
        """Raises ApiError (503, with Retry-After) unless requests are taken."""
        if (error := self.refusal()) is not None:
            raise error

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside the block a response is under way."""
        self.num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_running -= 1
            if not self.num_running:
                self._idle.set()

    async def wait_drained(self, timeout: float) -> bool:
        """Waits until no response is under way, so many seconds at most; returns whether that is so."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        return not self.num_running


def loss(status: "CoreStatus") -> str:
    """Returns why an engine that is no more alive is lost, in the words of those who run a server."""
    return f"the engine is lost: {status.reason}"
