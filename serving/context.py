"""What the routes of one server share."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .config import ServeConfig

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection


@dataclass(kw_only=True, slots=True)
class Serving:
    """One server's runtime, config and books; routes get it by serving_of(request)."""

    config: ServeConfig
    runtime: Any
    admission: Any = None
    keys: Any = None
    lifecycle: Any = None
    metrics: Any = None
    metrics_page: Any = None
    request_log: Any = None
    tracing: Any = None
    fingerprint: str | None = None
    """What the bits of answers depend on, once it is known."""
    created: int = field(default_factory=lambda: int(time.time()))
    """When the server began, in seconds since 1970."""


def serving_of(request: "HTTPConnection") -> Serving:
    """Returns what the routes of the request's server share."""
    serving: Serving = request.app.state.serving
    return serving
