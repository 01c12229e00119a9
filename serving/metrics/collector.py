"""What /metrics answers: the books and the engine's figures in Prometheus' text format, made at scrape."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from .families import (
    ENGINE_FAMILIES,
    HEALTH_FAMILIES,
    PREFIX,
    PROCESS_FAMILIES,
    QUEUE_FAMILIES,
    SERVER_FAMILIES,
    SWAP_FAMILIES,
    Family,
)
from .metrics import Metrics

STATS_SECONDS = 1.0  # how long figures of the engine stay, and how long a scrape waits for new ones


class EngineFigures:
    """The engine's stats for scrapes: a second old at most while it answers, and never waited for long."""

    def __init__(self) -> None:
        self._stats: dict[str, Any] | None = None
        self._read_at = float("-inf")
        self._asked: asyncio.Task[dict[str, Any]] | None = None

    async def read(self, runtime: Any, number: int) -> dict[str, Any] | None:
        """Returns the Runtime.stats() of an engine, by its number, or None where there have been none yet.

        A long step keeps the figures from before it; however many scrapes meet it, it is asked once.
        """
        if time.monotonic() - self._read_at > STATS_SECONDS:
            await self._ask(runtime, number)
        return self._stats

    async def _ask(self, runtime: Any, number: int) -> None:
        if self._asked is None:
            self._asked = asyncio.ensure_future(runtime.stats(number))
        asked = self._asked
        done, _ = await asyncio.wait({asked}, timeout=STATS_SECONDS)
        if not done or asked is not self._asked:  # another scrape has read it
            return
        self._asked = None
        if not asked.cancelled() and asked.exception() is None:
            self._stats, self._read_at = asked.result(), time.monotonic()


@dataclass(frozen=True, kw_only=True, slots=True)
class Scraped:
    """One model of a server, as a scrape finds it."""

    metrics: Metrics
    runtime: Any = None
    """An AsyncRuntime, or None while there is none yet."""
    num_waiting: int = 0
    """Requests that wait for admission to it, ahead of its own queue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """What one model's families are read from."""

    metrics: Metrics
    waiting: dict[str, int]
    stats: dict[int, Any]  # of each engine that steps
    health: dict[int, Any]  # of each engine, once it is loaded


class MetricsPage:
    """The answers of /metrics of one server, over the books of its models."""

    def __init__(self) -> None:
        self._engines: defaultdict[tuple[str, int], EngineFigures] = defaultdict(EngineFigures)
        self._process = ProcessCollector(registry=None)

    async def render(self, models: Iterable[Scraped], *, accept: str = "") -> tuple[bytes, str]:
        """Returns the page and its content type, OpenMetrics where the client accepts that."""
        found = await asyncio.gather(*(self._find(model) for model in models))
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._process)
        registry.register(_Scrape(found))
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    async def _find(self, model: Scraped) -> _Found:
        runtime, name = model.runtime, model.metrics.model_name
        numbers = [] if runtime is None else [engine.number for engine in runtime.engines()]
        read = await asyncio.gather(*(self._engines[name, each].read(runtime, each) for each in numbers))
        # once: a page is of one moment
        health = {} if runtime is None else {engine.number: engine for engine in runtime.engines()}
        stats = {
            number: found
            for number, found in zip(numbers, read, strict=True)
            if found is not None and health[number].health.ok
        }
        waiting = {
            "server": model.num_waiting,
            "engine": sum(each["requests"]["waiting"] for each in stats.values()),
        }
        return _Found(metrics=model.metrics, waiting=waiting, stats=stats, health=health)


class _Scrape(Collector):
    """Yields every family of one moment, with the values of each model that has it."""

    def __init__(self, models: Sequence[_Found]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Returns what prometheus-client writes out."""
        all_books = [(each.metrics.model_name, each.metrics) for each in self._models]
        stepping = [each for each in self._models if each.stats]
        yield from _made(SERVER_FAMILIES, all_books)
        yield from _made(PROCESS_FAMILIES, all_books[:1])
        if len(all_books) > 1:
            yield from _made(SWAP_FAMILIES, all_books)
        yield from _made(QUEUE_FAMILIES, [(each.metrics.model_name, each.waiting) for each in stepping])
        yield from _made(ENGINE_FAMILIES, [(each.metrics.model_name, each.stats) for each in stepping])
        alive = [each for each in self._models if each.health]
        if alive:
            yield from _made(HEALTH_FAMILIES, [(each.metrics.model_name, each.health) for each in alive])
        else:
            yield _family(HEALTH_FAMILIES[0], [(name, {("0",): 0}) for name, _ in all_books])


def _made(families: Iterable[Family], sources: Sequence[tuple[str, Any]]) -> Iterator[Metric]:
    """Yields families as read from each model's source; none without sources."""
    for family in families if sources else ():
        yield _family(family, [(name, family.read(source)) for name, source in sources])


def _family(family: Family, values: Iterable[tuple[str, Any]]) -> Metric:
    """Returns one family with the values it has now, each under its model's name."""
    name, labels = PREFIX + family.name, ["model_name", *family.labels]
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(name, family.help, labels=labels)
        for model_name, value in values:
            histogram.add_metric([model_name], value.cumulative(), value.sum)
        return histogram
    made = (CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily)(
        name, family.help, labels=labels
    )
    for model_name, value in values:
        for own, count in value.items() if family.labels else [((), value)]:
            made.add_metric([model_name, *own], float(count))
    return made
