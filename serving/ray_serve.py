"""Replicas of a server behind Ray Serve, as many as there is work for: `lamina serve MODEL --ray`."""

import asyncio
import math
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..common.errors import ConfigError, EngineDeadError, UnsupportedError, shown
from ..common.extras import require
from ..runtime.executor.ray_cluster import CLUSTER
from .config import ServeConfig
from .loading import OpenRuntime
from .ray_config import RayServeConfig
from .response_body import SentBody
from .server import ENGINE_LOST, LAST_WORDS, Server

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

APP = "lamina"  # the name of the application and of its one deployment
LOOK_SECONDS = 0.05  # between two looks at a server that loads
HEALTH_SECONDS = 2.0  # between two questions of Ray Serve whether a replica is well
NOT_HERE = ("uds", "tls_cert", "tls_key")  # of who listens, which is Ray Serve


def serve_on_ray(config: ServeConfig, replicas: RayServeConfig, model: str, **opening: Any) -> int:
    """Deploys on the cluster of RAY_ADDRESS, or one of its own, until a signal; returns the exit code.

    opening: `engine` and `settings`, as deployed() has them. Raises ConfigError or UnsupportedError for
    what Ray Serve has no way for, EngineDeadError where there is no cluster or no replica can be started.
    """
    _require_possible(config)
    CLUSTER.join()
    try:
        serve = _ray_serve()
        serve.start(http_options={"host": config.host, "port": config.port})
        with _signals() as stopping:
            try:
                _run(serve, deployed(config, replicas, model, **opening))
                _say(f"serving {config.model_names[0]} at http://{config.host}:{config.port}")
                return _until_stopped(serve, stopping)
            finally:
                _say(f"draining, {config.drain_timeout:g} s at most", sys.stderr)
                serve.delete(APP)
    finally:
        CLUSTER.leave()


def application(args: Mapping[str, Any]) -> Any:
    """Returns the application that config files of Ray Serve name, of their args.

    args: `model`; `serve`, fields of ServeConfig; `settings`, of RuntimeConfig; `replicas`, of
    RayServeConfig; `engine`, "process" or "thread". Raises ConfigError for others.
    """
    given = dict(args)
    model, serve, replicas = (given.pop(name, {}) for name in ("model", "serve", "replicas"))
    if not isinstance(model, str) or {*given} - {"engine", "settings"}:
        raise ConfigError(f"args are {shown([*args])}; wanted model, serve, settings, replicas and engine")
    config = ServeConfig(**{"model_names": (model,), **serve})
    return deployed(config, RayServeConfig(**replicas), model, **given)


def deployed(
    config: ServeConfig,
    replicas: RayServeConfig,
    model: str,
    *,
    engine: str = "process",
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """Returns a deployment of Ray Serve's that is bound to these, to be run.

    settings: of RuntimeConfig; they have to pickle, and the model lies at the same path on every node.
    """
    settings = settings or {}
    if settings.get("executor") == "ray":
        raise UnsupportedError("executor is 'ray' with Ray Serve; wanted another one, in each replica")
    serve = _ray_serve()
    deployment = serve.deployment(
        name=APP,
        max_ongoing_requests=config.max_connections,  # who waits is the replica's own affair
        graceful_shutdown_timeout_s=config.drain_timeout + 2 * LAST_WORDS,
        health_check_period_s=HEALTH_SECONDS,
        ray_actor_options={
            "num_cpus": replicas.num_cpus,
            "num_gpus": _num_gpus(replicas, settings),
            "runtime_env": {"env_vars": CLUSTER.actor_env()},
        },
        **replicas.options,
    )
    opened = partial(_open, model, engine, settings)
    return deployment(serve.ingress(running_app)(Replica)).bind(config, opened)


def _num_gpus(replicas: RayServeConfig, settings: Mapping[str, Any]) -> float:
    if replicas.num_gpus is not None or settings.get("device") == "cpu":
        return replicas.num_gpus or 0.0
    if not import_module("ray").cluster_resources().get("GPU"):
        return 0.0
    ranks = (settings.get(name) or 1 for name in ("tensor_parallel", "pipeline_parallel", "data_parallel"))
    return float(math.prod(ranks))


async def _open(model: str, engine: Any, settings: Mapping[str, Any]) -> Any:
    module = await asyncio.to_thread(import_module, "lamina.runtime.async_runtime")
    return await module.AsyncRuntime.from_pretrained(model, engine=engine, **settings)


def _require_possible(config: ServeConfig) -> None:
    for name in NOT_HERE:
        if getattr(config, name) is not None:
            raise UnsupportedError(f"{name} is given with Ray Serve, which listens itself, at host and port")
    if config.port == 0:
        raise ConfigError("port is 0; wanted one by its number, as Ray Serve listens at every node")


class Replica:
    """A server without a socket in an actor of Ray Serve's, which calls its app and asks how it is."""

    async def __init__(self, config: ServeConfig, open_runtime: OpenRuntime) -> None:  # type: ignore[misc]
        """Returns once the model is loaded; raises what loading raises."""
        self._server = Server(config, open_runtime)
        self._life = asyncio.create_task(self._server.serve_calls())
        while not self._server.is_ready.is_set():
            if self._life.done():
                raise EngineDeadError(f"the server ended with {self._life.result()} while it loaded")
            await asyncio.sleep(LOOK_SECONDS)
        _servers.append(self._server)

    async def check_health(self) -> None:
        """Raises EngineDeadError once the engine is lost: Ray Serve starts another replica then."""
        if self._life.done() or self._server.lifecycle.state == "failed":
            raise EngineDeadError(str(self._server.lifecycle.reason))

    async def __del__(self) -> None:
        """Ends the server once Ray Serve has drained it."""
        self._server.stop()
        await self._life


_servers: list[Server] = []  # of the replica that this process is


def running_app() -> "ASGIApp":
    """Returns the app of this process's replica, once that has loaded its model."""
    app = _servers[-1].app

    async def call(scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] == "http":
            scope["lamina.body"] = SentBody(send)
        await app(scope, receive, send)

    return call


def _ray_serve() -> Any:
    try:
        return require("ray.serve", extra="ray")
    except ModuleNotFoundError as error:
        message = f"Ray Serve needs the package {error.name}, which is not installed"
        raise UnsupportedError(f"{message}; pip install 'lamina[ray]'") from error


def _run(serve: Any, app: Any) -> None:
    try:
        serve.run(app, name=APP, route_prefix="/")
    except RuntimeError as error:  # with the traceback of the replica
        raise EngineDeadError(f"no replica could be started: {error}") from error


def _until_stopped(serve: Any, stopping: threading.Event) -> int:
    """Returns 0 once a signal came, ENGINE_LOST where somebody else has ended the application."""
    while not stopping.wait(HEALTH_SECONDS):
        if APP not in serve.status().applications:
            return ENGINE_LOST
    return 0


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set; a second one raises KeyboardInterrupt."""
    stopping = threading.Event()

    def stop(*_: object) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()

    before = {each: signal.signal(each, stop) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopping
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _say(text: str, stream: Any = None) -> None:
    print(f"lamina: {text}", file=stream or sys.stdout, flush=True)
