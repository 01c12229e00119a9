"""Middleware after which a request holds nothing, whatever became of it."""

import asyncio
from typing import TYPE_CHECKING

from .lease import Lease

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


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
