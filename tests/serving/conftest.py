"""Real servers on loopback around a TINY model: one that tests share, and others with their own settings."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from lamina.serving.config import ServeConfig
from lamina.serving.server import Server

from ..engine_gate import EngineGate, comes_true, held

NAME = "tiny"
SETTINGS = {"compile": False, "device": "cpu", "num_kv_blocks": 256, "max_num_seqs": 32}


class RunningServer:
    """A server in a thread with an event loop of its own; its address, a client of it, and its end."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        settings: dict[str, Any],
        may_load: threading.Event | None = None,
    ) -> None:
        """may_load: the model is loaded once it is set; the server is returned before, as it listens."""
        self.folder, self.settings, self._may_load = folder, {**SETTINGS, **settings}, may_load
        self.server = self._made(config)
        self.code: int | None = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        while not self.server.is_ready.wait(0.05) and not (may_load and self.server.address):
            if not self.thread.is_alive():
                raise self.error or RuntimeError(f"the server ended with {self.code}")
        self.url = str(self.server.address)
        self.client = self._client(config)

    def _made(self, config: dict[str, Any]) -> Server:
        return Server(ServeConfig(**{"model_names": (NAME,), "port": 0, **config}), self._open)

    def _client(self, config: dict[str, Any]) -> httpx.Client:
        if (uds := config.get("uds")) is not None:
            transport = httpx.HTTPTransport(uds=str(uds))
            return httpx.Client(base_url="http://localhost", transport=transport, timeout=60)
        context = None
        if (certificate := config.get("tls_cert")) is not None:
            context = ssl.create_default_context(cafile=certificate)
        return httpx.Client(base_url=self.url, timeout=60, verify=context or True)

    @property
    def serving(self) -> Any:
        """What the routes of the server share, such as the runtime; used in the server's loop alone."""
        return self.server.serving

    def in_loop(self, function: Callable[[], Any]) -> Any:
        """Returns what a coroutine function returns in the server's loop."""
        assert self.server._loop is not None
        return asyncio.run_coroutine_threadsafe(function(), self.server._loop).result(60)

    def held(self) -> AbstractContextManager[EngineGate]:
        """The gate of its engine: within the block only the steps are planned that it lets through."""
        return held(self.serving.runtime)

    def comes_to_rest(self) -> None:
        """Returns once nothing is held: no block, request, lease or response; AssertionError if any stays."""

        def is_at_rest() -> bool:
            held.update(self.in_loop(self._held))
            return not any(held.values())

        held: dict[str, int] = {}
        assert comes_true(is_at_rest), held

    async def _held(self) -> dict[str, int]:
        stats, books = await self.serving.runtime.stats(), self.serving.admission
        live = {name: stats["requests"][name] for name in ("running", "waiting")}
        return {
            **live,
            "blocks": stats["blocks"]["used"],
            "admitted": books.num_admitted,
            "queued": books.num_waiting,
            "responses": self.server.lifecycle.num_running,
        }

    def comes_round(self) -> None:
        """Returns once its event loop has read what had arrived at its connections before."""

        async def turn() -> None:
            for _ in range(3):  # a turn may have looked at its connections before this came
                await asyncio.sleep(0)

        self.in_loop(turn)

    def is_connected(self, client: socket.socket) -> bool:
        """Whether the server has the other end of a client's connection open."""
        ports = [f":{port:04X}" for port in (urlsplit(self.url).port, client.getsockname()[1])]
        rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
        ends = [(row[1][-5:], row[2][-5:], row[9] != "0") for row in rows]  # an inode: somebody has it open
        return (*ports, True) in ends

    def close(self) -> int | None:
        """End the server and return its exit code."""
        self.client.close()
        self.server.stop()
        self.thread.join(60)
        assert not self.thread.is_alive(), "the server does not end"
        if self.error is not None:
            raise self.error
        return self.code

    def _run(self) -> None:
        try:
            self.code = asyncio.run(self.server.run())
        except BaseException as error:
            self.error = error

    async def _open(self) -> Any:
        from lamina.runtime.async_runtime import AsyncRuntime

        if self._may_load is not None:
            await asyncio.to_thread(self._may_load.wait)
        return await AsyncRuntime.from_pretrained(self.folder, engine="thread", **self.settings)


@pytest.fixture(scope="session")
def start_server(tiny_text_folder: Path) -> Iterator[Callable[..., RunningServer]]:
    """start_server(settings={of the runtime}, folder=, may_load=, **config) -> RunningServer, closed last."""
    started = []

    def start(
        *,
        settings: dict[str, Any] | None = None,
        folder: Path | None = None,
        may_load: threading.Event | None = None,
        **config: Any,
    ) -> RunningServer:
        started.append(RunningServer(folder or tiny_text_folder, config, settings or {}, may_load))
        return started[-1]

    yield start
    for server in started:
        if server.thread.is_alive():
            server.close()


@pytest.fixture(scope="session")
def server(start_server: Callable[..., RunningServer]) -> RunningServer:
    """The server that tests share: without keys, with the TINY model and its default limits."""
    return start_server()


@pytest.fixture(scope="session")
def client(server: RunningServer) -> httpx.Client:
    """A client of the shared server."""
    return server.client


@pytest.fixture(scope="session")
def scripted_server(
    start_server: Callable[..., RunningServer], scripted_folder: Callable[..., Path], bbpe_tokenizer: Any
) -> Callable[..., RunningServer]:
    """scripted_server(tokens or logits, settings={}, **config) -> server, to be asked [1]."""

    def make(script: Any, *, settings: dict[str, Any] | None = None, **config: Any) -> RunningServer:
        given = {"tokenizer": bbpe_tokenizer(), **(settings or {})}
        return start_server(folder=scripted_folder(script), settings=given, **config)

    return make
