"""The ASGI application: all routes, inside the layers that every request passes."""

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import BaseRoute

from . import routes
from .admission.lease import Leases
from .auth.authentication import Authentication
from .lifecycle import Lifecycle
from .middleware.cors import Cors
from .middleware.error_handling import ErrorHandling
from .middleware.gate import Gate
from .middleware.observation import Observation
from .middleware.request_ids import RequestIds
from .middleware.root_path import RootPath
from .routes.page import PATHS, page_routes
from .served_models import ServedModels

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

ASKED_MOST = ("chat", "completions")  # routes are tried one after the other


def create_app(models: ServedModels, lifecycle: Lifecycle) -> Starlette:
    """Returns the application of a server: every routes/*.py, inside the layers in their order.

    The outermost comes first: books, errors and common headers, ids, CORS, keys, whether requests are taken,
    and what they hold until they end.
    """
    serving = models.first
    config = serving.config
    shown = PATHS if config.page else ()
    layers = [
        Middleware(Observation, metrics=serving.metrics, log=serving.request_log, tracing=serving.tracing),
        Middleware(ErrorHandling),
        Middleware(RequestIds),
        Middleware(RootPath, root_path=config.root_path, has_page=config.page),
        Middleware(Cors, origins=config.cors_origins, credentials=config.cors_credentials),
        Middleware(
            Authentication,
            keys=serving.keys,
            open_routes=(*config.open_routes, *shown),
            origins=("*",) if config.no_auth else config.cors_origins,
        ),
        Middleware(Gate, lifecycle=lifecycle, always=shown),
        Middleware(Leases),
    ]
    served = [*_all_routes(), *(page_routes() if config.page else ())]
    app = _App(routes=served, middleware=layers)
    app.router.redirect_slashes = False  # a path with a slash too many is unknown, and said to be
    app.state.models = models
    app.state.lifecycle = lifecycle
    return app


class _App(Starlette):
    """Starlette without layers of its own, as ErrorHandling answers all that is raised inside of it."""

    def build_middleware_stack(self) -> "ASGIApp":
        app: ASGIApp = self.router
        for layer, args, kwargs in reversed(self.user_middleware):
            app = layer(app, *args, **kwargs)
        return app


def _all_routes() -> list[BaseRoute]:
    names = {each.name for each in pkgutil.iter_modules(routes.__path__)}
    ordered = (*ASKED_MOST, *sorted(names.difference(ASKED_MOST)))
    found = [route for name in ordered for route in import_module(f"{routes.__name__}.{name}").ROUTES]
    for route in found:
        route.app = _answered_by(route.endpoint)
    return found


def _answered_by(endpoint: "Callable[[Request], Awaitable[Response]]") -> "ASGIApp":
    """Returns the application of a route, without Starlette's own layer around it that answers errors."""

    async def app(scope: "Scope", receive: "Receive", send: "Send") -> None:
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)

    return app
