"""Who asks: one key with what it may ask for, as routes find it in their request."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import ApiError
from .limits import Limits, Meter

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One key as configured. The secret itself is kept nowhere, only its SHA-256."""

    name: str
    digest: bytes = field(repr=False)
    limits: Limits = field(default_factory=Limits)
    priority: int = 0  # its requests are never more urgent; lower is served first
    routes: tuple[str, ...] | None = None  # paths; * at the end stands for any rest; None: all
    models: tuple[str, ...] | None = None  # names of models; None: all
    admin: bool = False  # whether it may administer the server


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key as it is used: scope["lamina.key"] of every request but those that need none."""

    entry: Entry
    meter: Meter = field(repr=False)

    @property
    def name(self) -> str:
        """What logs, metrics and owners of requests call it."""
        return self.entry.name

    def allows_model(self, name: str) -> bool:
        """Returns whether it may ask the model of this name."""
        return self.entry.models is None or name in self.entry.models

    def require_model(self, name: str) -> None:
        """Raises ApiError 403 where it may not ask the model of this name."""
        if not self.allows_model(name):
            message = f"this key may not ask model {name[:100]!r}"
            raise ApiError(status=403, message=message, param="model", code="model_not_allowed")

    def require_route(self, path: str) -> None:
        """Raises ApiError 403 where it may not ask this path."""
        routes = self.entry.routes
        if routes is not None and not any(_covers(route, path) for route in routes):
            message = f"this key may not use {path[:100]!r}"
            raise ApiError(status=403, message=message, code="route_not_allowed")

    def require_admin(self) -> None:
        """Raises ApiError 403 where it may not administer the server, as nobody may without a key."""
        if not self.entry.admin:
            message = "this needs an admin key: one with admin = true in the server's --api-key-file"
            raise ApiError(status=403, message=message, code="admin_only")


def key_of(request: "HTTPConnection") -> Key:
    """Returns the key that a request was authenticated by."""
    key: Key = request.scope["lamina.key"]
    return key


def _covers(route: str, path: str) -> bool:
    return path.startswith(route[:-1]) if route.endswith("*") else path == route
