"""Models of one server whose engines sleep, wake and load when a test says so."""

import asyncio
from types import SimpleNamespace

from lamina.serving.metrics.metrics import Metrics
from lamina.serving.model_swap.policy import SwapPolicy
from lamina.serving.model_swap.swapper import Swapper

from ..admission.books import Clock, Connection, admission, ask, key


async def settle():
    """Lets everything happen that waits for nothing but its turn in the event loop."""
    for _ in range(60):
        await asyncio.sleep(0)


class Engine:
    """A runtime that says when it is put to sleep and woken, and fails where it is to."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.error: Exception | None = None  # what the next calls raise
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_alive = True

    async def sleep(self, level):
        await self._do(f"sleep {level}")

    async def wake(self):
        await self._do("wake")

    async def _do(self, what):
        self.log.append(f"{self.name} {what}")
        await self.gate.wait()
        if self.error is not None:
            raise self.error

    def fail(self, error):
        self.log.append(f"{self.name} fail: {error}")

    def health(self):
        return SimpleNamespace(status=SimpleNamespace(is_alive=self.is_alive))


class Server:
    """Models whose requests wait and end by hand."""

    def __init__(self, names="abc", *, max_num_seqs=2, level=1, not_loaded="", **policy) -> None:
        self.clock, self.log = Clock(), []
        self.engines = {name: Engine(name, self.log) for name in names}
        self.models = {name: self._model(name, max_num_seqs) for name in names}
        for name in not_loaded:
            self.models[name].loaded = None
        self.swapper = Swapper(
            self.models, SwapPolicy(**policy), level=level, load=self._load, clock=self.clock
        )
        self.running = asyncio.ensure_future(self.swapper.run())

    def _model(self, name, max_num_seqs):
        loaded = SimpleNamespace(
            runtime=self.engines[name],
            admission=admission(max_num_seqs=max_num_seqs, clock=self.clock),
        )
        config = SimpleNamespace(max_waiting=2)
        return SimpleNamespace(loaded=loaded, metrics=Metrics(name), config=config, **vars(loaded))

    async def _load(self, model):
        await model.runtime._do("load")
        model.loaded = SimpleNamespace(runtime=model.runtime, admission=model.admission)

    async def ask(self, name, **own):
        """A request under way: its connection, and the task that ends with its lease."""
        connection = Connection(key(), **own)
        task = asyncio.ensure_future(ask(self.models[name].admission, connection))
        await settle()
        return connection, task

    async def end(self, task):
        """Ends a request that was admitted."""
        await task.result().aclose()
        await settle()

    async def advance(self, seconds):
        self.clock.now += seconds
        self.swapper._changed.set()  # as the timer does
        await settle()

    async def close(self):
        self.running.cancel()
        await asyncio.wait([self.running])
        assert self.running.cancelled(), self.running.exception()


def serving(test):
    """Runs a coroutine function with a server of its own, which must not fail."""

    def run():
        async def body():
            server = Server(**getattr(test, "own", {}))
            await settle()
            await test(server)
            await server.close()

        asyncio.run(body())

    run.__name__ = test.__name__
    return run


def with_(**own):
    def mark(test):
        test.own = own
        return test

    return mark
