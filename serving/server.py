"""A server's life: it listens at once, loads the model, serves, and ends as it is told to."""

import asyncio
import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn

from ..common.errors import ClosedError
from ..common.logging import get_logger
from .admission.admission import Admission
from .app import create_app
from .auth.keys import Keys
from .config import ServeConfig
from .context import Loaded, Serving
from .lifecycle import Lifecycle, loss
from .listening import BACKLOG, address_of, allow_files, listen, stop_listening, tls_context
from .metrics.collector import MetricsPage
from .metrics.metrics import Metrics
from .metrics.request_log import RequestLog
from .metrics.tracing import Tracing
from .middleware.connection import Connection
from .stored_responses import Responses
from .tools.formats import reasoning_tags, tool_format

if TYPE_CHECKING:
    from ..runtime.async_runtime import AsyncRuntime

logger = get_logger("serving")
OpenRuntime = Callable[[], Awaitable["AsyncRuntime"]]

ENGINE_LOST = 1  # the exit code
WATCH_INTERVAL = 0.25  # seconds between two looks at the engine
LAST_WORDS = 5.0  # seconds for running responses to send their error once the engine has ended
NUM_ACCEPTED = 64  # connections taken in each time the loop comes round: uvloop takes one a socket
CLOSING = 2  # seconds for clients to take what is still to be sent


def serve(config: ServeConfig, open_runtime: OpenRuntime) -> int:
    """Serves until a signal, or until the engine is lost; returns the exit code.

    Raises ConfigError where it cannot listen or read the certificate, and whatever loading the model raises.
    """
    server = Server(config, open_runtime)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        code = runner.run(server.run(handle_signals=True))
        if server.is_abandoned:
            _leave(code)
    return code


class Server:
    """One server: run() is its life, stop() asks for its end, from any thread."""

    def __init__(self, config: ServeConfig, open_runtime: OpenRuntime) -> None:
        self.config = config
        self.lifecycle = Lifecycle()
        tool_format(config.tool_parser, None)  # unknown names are told before a model is loaded
        reasoning_tags(config.reasoning_parser, None)
        metrics = Metrics(config.model_names[0])
        self.serving = Serving(
            config=config,
            keys=Keys.load(config),
            lifecycle=self.lifecycle,
            metrics=metrics,
            metrics_page=MetricsPage(metrics),
            request_log=RequestLog.of(config, self._decode),
            tracing=Tracing.to(config.otlp_traces_endpoint) if config.otlp_traces_endpoint else None,
            responses=Responses(max_bytes=config.max_stored_bytes, seconds=config.stored_seconds),
        )
        self.app = create_app(self.serving)
        self.address: str | None = None  # once it listens
        self.is_ready = threading.Event()
        self.is_abandoned = False  # whether a thread still loads what nobody waits for
        self._open_runtime = open_runtime
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
            for books in (self.serving.tracing, self.serving.request_log):
                if books is not None:
                    await asyncio.to_thread(books.close)

    def stop(self) -> None:
        """Begins the end, as SIGTERM does: no new requests, and running ones have drain_timeout."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)

    async def _live(self, owns_process: bool) -> int:
        _say(f"listening at {self.address}; the model is loading", sys.stderr)
        stopping = asyncio.create_task(self._stopping.wait())
        loading = asyncio.create_task(self._load())
        await asyncio.wait((stopping, loading), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            await asyncio.wait((loading,), timeout=LAST_WORDS)
            self.is_abandoned = not loading.done()
            return 0
        runtime = await loading
        try:
            if owns_process:
                runtime.freeze_garbage()
            self.lifecycle.ready()
            self.is_ready.set()
            _say(f"serving {self.config.model_names[0]} at {self.address}", sys.stdout)
            losing = asyncio.create_task(self._watch(runtime))
            await asyncio.wait((stopping, losing), return_when=asyncio.FIRST_COMPLETED)
            return await self._end(losing)
        finally:
            await runtime.close()

    def _decode(self, token_ids: Sequence[int]) -> str:
        tokenizer = self.serving.runtime.input.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode(token_ids, skip_special_tokens=False))

    async def _load(self) -> "AsyncRuntime":
        """The runtime, once it has computed what it is asked for first."""
        runtime = await self._open_runtime()
        try:
            await runtime.warm_up()
            for name, folder in self.config.adapters:
                await runtime.load_adapter(name, folder)
            fingerprint = await runtime.call("fingerprint")
        except BaseException:
            await runtime.close()
            raise
        admission = Admission(self.config, self.lifecycle, self.serving.keys, runtime)
        for listener in (self.serving.metrics, admission):
            runtime.listen(listener)
        self.serving.loaded = Loaded(runtime=runtime, admission=admission, fingerprint=fingerprint)
        return runtime

    async def _watch(self, runtime: "AsyncRuntime") -> None:
        """Returns once the engine is lost, which the lifecycle then says, and the process is to end."""
        was_ok = True
        while (health := runtime.health()).status.is_alive:
            if health.ok != was_ok:
                logger.warning("the engine %s", "steps again" if health.ok else f"stalls: {health.reason}")
                was_ok = health.ok
            await asyncio.sleep(WATCH_INTERVAL)
        reason = loss(health.status)
        self.lifecycle.fail(reason)
        self.serving.admission.refuse_waiting(reason)
        logger.error("%s", reason)
        if not self.config.exit_on_engine_loss:
            await asyncio.Event().wait()

    async def _end(self, losing: "asyncio.Task[None]") -> int:
        """Lets running responses end, in drain_timeout unless the engine is lost; returns the exit code."""
        if not losing.done():
            self.lifecycle.drain()
            _say(f"draining, {self.config.drain_timeout:g} s at most", sys.stderr)
            draining = asyncio.create_task(self.lifecycle.wait_drained(self.config.drain_timeout))
            await asyncio.wait((draining, losing), return_when=asyncio.FIRST_COMPLETED)
        if not losing.done():
            losing.cancel()
            self.serving.admission.refuse_waiting("the server is shutting down")
            self.serving.runtime.fail(ClosedError("the server is shutting down"))
        await self.lifecycle.wait_drained(LAST_WORDS)
        return 0 if self.serving.runtime.health().status.is_alive else ENGINE_LOST

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
