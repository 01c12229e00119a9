"""A server's life: it listens at once, loads the model, serves, and ends as it is told to."""

import asyncio
import contextlib
import dataclasses
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NoReturn

import uvicorn

from ..common.errors import ClosedError, ConfigError, shown
from ..common.logging import get_logger
from .app import create_app
from .auth.keys import Keys
from .config import ServeConfig
from .context import Serving
from .lifecycle import Lifecycle, loss
from .listening import BACKLOG, address_of, allow_files, listen, stop_listening, tls_context
from .loading import OpenRuntime, close_models, load_model, load_models
from .metrics.collector import MetricsPage
from .metrics.metrics import Metrics
from .metrics.request_log import RequestLog
from .metrics.tracing import Tracing
from .middleware.connection import Connection
from .model_swap.policy import SwapPolicy
from .model_swap.swapper import Swapper
from .served_models import ServedModels
from .stored_responses import Responses
from .tools.formats import reasoning_tags, tool_format

logger = get_logger("serving")
Model = tuple[ServeConfig, OpenRuntime]

ENGINE_LOST = 1  # the exit code
WATCH_INTERVAL = 0.25  # seconds between two looks at the engine
LAST_WORDS = 5.0  # seconds for running responses to send their error once the engine has ended
NUM_ACCEPTED = 64  # connections taken in each time the loop comes round: uvloop takes one a socket
CLOSING = 2  # seconds for clients to take what is still to be sent


def serve(config: ServeConfig, open_runtime: OpenRuntime, others: Sequence[Model] = ()) -> int:
    """Serves until a signal, or until the engine is lost; returns the exit code.

    others: further models, as Server has them. Raises ConfigError where it cannot listen or read the
    certificate, and whatever loading a model raises.
    """
    server = Server(config, open_runtime, others)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        code = runner.run(server.run(handle_signals=True))
        if server.is_abandoned:
            _leave(code)
    return code


class Server:
    """One server: run() is its life, stop() asks for its end, from any thread."""

    def __init__(self, config: ServeConfig, open_runtime: OpenRuntime, others: Sequence[Model] = ()) -> None:
        """others: further models that take turns on the same device, with configs that are the first's but
        for their names and adapters. ConfigError where two have a name in common.
        """
        self.config = config
        self.lifecycle = Lifecycle()
        tool_format(config.tool_parser, None)  # unknown names are told before a model is loaded
        reasoning_tags(config.reasoning_parser, None)
        metrics = Metrics(config.model_names[0])
        self.serving = Serving(
            config=config,
            keys=Keys.load(config),
            lifecycle=Lifecycle() if others else self.lifecycle,
            metrics=metrics,
            metrics_page=MetricsPage(),
            request_log=RequestLog.of(config, self._decode),
            tracing=Tracing.to(config.otlp_traces_endpoint) if config.otlp_traces_endpoint else None,
            responses=Responses(max_bytes=config.max_stored_bytes, seconds=config.stored_seconds),
        )
        self.models = ServedModels([self.serving, *(self._another(own) for own, _ in others)])
        _check_several(self.models)
        self.app = create_app(self.models, self.lifecycle)
        self.address: str | None = None  # once it listens
        self.is_ready = threading.Event()
        self.is_abandoned = False  # whether a thread still loads what nobody waits for
        self._open_runtimes = [open_runtime, *(own for _, own in others)]
        self._watching: list[asyncio.Task[None]] = []  # each engine, until it is lost
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()

    async def run(self, *, handle_signals: bool = False) -> int:
        """Listens, loads, serves, and returns the exit code; raises what listening or loading raises."""
        self._loop = asyncio.get_running_loop()
        http = _HttpServer(self._http_config())
        listener = listen(self.config)
        self.address = address_of(self.config, listener)
        ways = [listener, *(listener.dup() for _ in range(NUM_ACCEPTED - 1))]
        listening = asyncio.create_task(http.serve(sockets=ways))
        watching = asyncio.create_task(self.serving.metrics.watch_loop())
        if handle_signals:
            self._handle_signals(self._loop)
        try:
            return await self._live(owns_process=handle_signals)
        finally:
            http.should_exit = True
            await listening
            watching.cancel()
            stop_listening(listener, self.config)
            await self._close_books()

    async def serve_calls(self) -> int:
        """As run(), for those who call the app themselves: it listens nowhere."""
        self._loop = asyncio.get_running_loop()
        watching = asyncio.create_task(self.serving.metrics.watch_loop())
        try:
            return await self._live(owns_process=False)
        finally:
            watching.cancel()
            await self._close_books()

    async def _close_books(self) -> None:
        for books in (self.serving.tracing, self.serving.request_log):
            if books is not None:
                await asyncio.to_thread(books.close)

    def stop(self) -> None:
        """Begins the end, as SIGTERM does: no new requests, and running ones have drain_timeout."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)

    async def _live(self, owns_process: bool) -> int:
        """Serves with one start of the engines after the other, as long as lost ones may be loaded again."""
        what = "the model is" if len(self.models) == 1 else f"{len(self.models)} models are"
        where = "called" if self.address is None else f"listening at {self.address}"
        _say(f"{where}; {what} loading", sys.stderr)
        stopping = asyncio.create_task(self._stopping.wait())
        num_left = self.config.max_restarts
        while (code := await self._serve_engines(stopping, owns_process)) == ENGINE_LOST and num_left:
            if stopping.done():
                break
            num_left -= 1
            self._begin_anew()
            _say(f"{what} loaded again, and {num_left} times more at most", sys.stderr)
        return code

    def _begin_anew(self) -> None:
        """Every model is as before it was loaded; their runtimes were closed."""
        self.models.swapper = None
        for serving in self.models:
            serving.loaded = None
        for lifecycle in self._lifecycles():
            lifecycle.restart()

    async def _serve_engines(self, stopping: "asyncio.Task[Literal[True]]", owns_process: bool) -> int:
        loading = asyncio.create_task(load_models(self.models, self._open_runtimes))
        await asyncio.wait((stopping, loading), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            await asyncio.wait((loading,), timeout=LAST_WORDS)
            self.is_abandoned = not loading.done()
            return 0
        await loading
        swapping = self._begin_swapping()
        try:
            if owns_process:
                self.serving.runtime.freeze_garbage()
            for lifecycle in self._lifecycles():
                lifecycle.ready()
            self.is_ready.set()
            served = ", ".join(serving.config.model_names[0] for serving in self.models)
            _say(f"serving {served}" + (f" at {self.address}" if self.address else ""), sys.stdout)
            self._watching = [asyncio.create_task(self._watch(serving)) for serving in self.models]
            losing = asyncio.create_task(self._until_lost())
            await asyncio.wait((stopping, losing, *swapping), return_when=asyncio.FIRST_COMPLETED)
            for task in swapping:
                if task.done():  # it never returns: this raises what nobody foresaw
                    task.result()
            return await self._end(losing)
        finally:
            for each in (*swapping, *self._watching):
                each.cancel()
            _, loading_on = await asyncio.wait((*swapping, *self._watching), timeout=LAST_WORDS)
            self.is_abandoned = bool(loading_on)
            await close_models(self.models)

    def _begin_swapping(self) -> "list[asyncio.Task[NoReturn]]":
        """Has several models take turns; with one there is nothing to do."""
        if len(self.models) == 1:
            return []
        config = self.config
        self.models.swapper = Swapper(
            {serving.config.model_names[0]: serving for serving in self.models},
            SwapPolicy(
                max_resident=config.max_resident,
                min_residence=config.min_residence,
                drain_timeout=config.swap_drain_timeout or None,
            ),
            level=config.swap_level,
            load=self._load_late,
        )
        return [asyncio.create_task(self.models.swapper.run())]

    async def _load_late(self, serving: Serving) -> None:
        await load_model(serving, self._open_runtimes[[*self.models].index(serving)])

    def _another(self, config: ServeConfig) -> Serving:
        """Returns the parts of a further model: what is not the whole server's is its own."""
        metrics = Metrics(config.model_names[0])
        return dataclasses.replace(self.serving, config=config, metrics=metrics, lifecycle=Lifecycle())

    def _lifecycles(self) -> list[Lifecycle]:
        return [self.lifecycle, *(serving.lifecycle for serving in self.models)]

    def _decode(self, model: str | None, token_ids: Sequence[int]) -> str:
        serving = None if model is None else self.models.known(model)
        tokenizer = (serving or self.serving).runtime.input.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode(token_ids, skip_special_tokens=False))

    async def _watch(self, serving: Serving) -> None:
        """Returns once a model's engine is lost, which its lifecycle then says."""
        while serving.loaded is None:
            await asyncio.sleep(WATCH_INTERVAL)
        was_ok, runtime = True, serving.runtime
        while (health := runtime.health()).status.is_alive:
            if health.ok != was_ok:
                logger.warning("the engine %s", "steps again" if health.ok else f"stalls: {health.reason}")
                was_ok = health.ok
            await asyncio.sleep(WATCH_INTERVAL)
        reason = loss(health.status)
        serving.lifecycle.fail(reason)
        serving.admission.refuse_waiting(reason)
        if self.models.swapper is not None:
            self.models.swapper.lose(serving.config.model_names[0])
            reason = f"{serving.config.model_names[0]}: {reason}"
        if self.config.exit_on_engine_loss or not self._alive():
            self.lifecycle.fail(reason)
        logger.error("%s", reason)

    async def _until_lost(self) -> None:
        """Returns once an engine is lost and the process is to end for it."""
        await asyncio.wait(self._watching, return_when=asyncio.FIRST_COMPLETED)
        if not self.config.exit_on_engine_loss:
            await asyncio.Event().wait()

    def _alive(self) -> list[Serving]:
        return [each for each in self.models if each.loaded and each.runtime.health().status.is_alive]

    async def _end(self, losing: "asyncio.Task[None]") -> int:
        """Lets running responses end, in drain_timeout unless no engine is left; returns the exit code."""
        if not losing.done():
            for lifecycle in self._lifecycles():
                lifecycle.drain()
            _say(f"draining, {self.config.drain_timeout:g} s at most", sys.stderr)
        if self.models.swapper is not None:
            self.models.swapper.hurry()
        draining = asyncio.create_task(self.lifecycle.wait_drained(self.config.drain_timeout))
        all_lost = asyncio.create_task(asyncio.wait(self._watching))
        await asyncio.wait((draining, all_lost), return_when=asyncio.FIRST_COMPLETED)
        losing.cancel()
        all_lost.cancel()
        for serving in self._alive():
            serving.admission.refuse_waiting("the server is shutting down")
            serving.runtime.fail(ClosedError("the server is shutting down"))
        await self.lifecycle.wait_drained(LAST_WORDS)
        return (
            0 if len(self._alive()) == sum(each.loaded is not None for each in self.models) else ENGINE_LOST
        )

    def _http_config(self) -> uvicorn.Config:
        num_connections = allow_files(self.config.max_connections)
        connection: Any = functools.partial(Connection, limits=self.config, max_connections=num_connections)
        http = uvicorn.Config(
            self.app,
            http=connection,
            backlog=BACKLOG,
            ws="none",
            lifespan="off",
            interface="asgi3",
            proxy_headers=False,
            server_header=False,
            access_log=False,
            log_config=None,
            log_level="critical",  # what fails is logged by the layers inside
            timeout_keep_alive=self.config.keep_alive_timeout,  # type: ignore[arg-type]  # any number does
            timeout_graceful_shutdown=CLOSING,
        )
        http.load()
        http.ssl = tls_context(self.config)
        return http

    def _handle_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self.serving.keys.reload)

    def _on_signal(self, number: int) -> None:
        if self._stopping.is_set():
            _leave(128 + number)
        self._stopping.set()


def _check_several(models: ServedModels) -> None:
    """Raises ConfigError for what models of one server cannot have together."""
    adapters = [name for serving in models for name, _ in serving.config.adapters]
    names = [*models.names, *adapters]
    twice = next((name for name in names if names.count(name) > 1), None)
    if len(models) > 1 and twice is not None:
        raise ConfigError(f"model_names has {shown(twice)} twice; wanted another name for each model")
    if len(models) > 1 and not models.first.config.max_waiting:
        raise ConfigError("max_waiting is 0; wanted 1 or more, as requests wait while their model sleeps")


class _HttpServer(uvicorn.Server):
    """uvicorn's listening and closing, without its handling of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _say(text: str, stream: Any) -> None:
    print(f"lamina: {text}", file=stream, flush=True)


def _leave(code: int) -> NoReturn:
    """End at once: no thread is waited for, and an engine of its own process sees that its parent is gone."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
