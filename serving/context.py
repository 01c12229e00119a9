"""What the routes of one server share, and what is of one of its models."""

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .config import ServeConfig

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection

    from ..runtime.async_runtime import AsyncRuntime
    from .admission.admission import Admission
    from .auth.keys import Keys
    from .lifecycle import Lifecycle
    from .metrics.collector import MetricsPage
    from .metrics.metrics import Metrics
    from .metrics.request_log import RequestLog
    from .metrics.tracing import Tracing
    from .stored_responses import Responses


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A server's model, once it is loaded and has computed a token."""

    runtime: "AsyncRuntime"
    admission: "Admission"
    fingerprint: str
    """What the bits of answers depend on."""


@dataclass(kw_only=True, slots=True)
class Serving:
    """The parts of a server for one of its models; routes get it by serving_of(request).

    Of several models each has its own config (in its names and adapters), lifecycle, metrics and `loaded`.
    """

    config: ServeConfig
    keys: "Keys"
    lifecycle: "Lifecycle"
    metrics: "Metrics"
    metrics_page: "MetricsPage"
    request_log: "RequestLog | None"
    tracing: "Tracing | None"
    responses: "Responses"
    loaded: Loaded | None = None
    """None while the model loads, in which Gate takes none but requests for health, metrics and the page;
    and of one of several until it is first asked, where they are loaded so late."""
    created: int = field(default_factory=lambda: int(time.time()))
    """When the server began, in seconds since 1970."""

    @property
    def runtime(self) -> "AsyncRuntime":
        """The engine."""
        return self._once_loaded.runtime

    @property
    def admission(self) -> "Admission":
        """The queue before the engine."""
        return self._once_loaded.admission

    @property
    def fingerprint(self) -> str:
        """What the bits of answers depend on."""
        return self._once_loaded.fingerprint

    @property
    def adapter_names(self) -> Collection[str]:
        """Names of its adapters: those that there are, or those that will be loaded with it."""
        if self.loaded is None:
            return dict(self.config.adapters)
        return self.loaded.runtime.input.adapters.keys()

    @property
    def _once_loaded(self) -> Loaded:
        assert self.loaded is not None, "a request was taken before the model was loaded"
        return self.loaded


def serving_of(request: "HTTPConnection") -> Serving:
    """Returns the parts of the model that a request asks: the server's first until choose() was called."""
    serving: Serving = request.scope.get("lamina.serving") or request.app.state.models.first
    return serving


def choose(request: "HTTPConnection", serving: Serving) -> None:
    """Notes which model a request asks: its admission, metrics and settings are the request's from now on."""
    request.scope["lamina.serving"] = serving
