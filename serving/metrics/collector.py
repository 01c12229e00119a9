"""What /metrics answers: the books and the engine's figures in Prometheus' text format, made at scrape."""

import asyncio
import time
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from .families import ENGINE_FAMILIES, HEALTH_FAMILIES, PREFIX, QUEUE_FAMILIES, SERVER_FAMILIES, Family
from .histogram import Histogram
from .metrics import Metrics

STATS_SECONDS = 1.0  # how long figures of the engine stay, and how long a scrape waits for new ones


class EngineFigures:
    """The engine's stats for scrapes: a second old at most while it answers, and never waited for long."""

    def __init__(self) -> None:
        self._stats: dict[str, Any] | None = None
        self._read_at = float("-inf")
        self._asked: asyncio.Task[dict[str, Any]] | None = None

    async def read(self, runtime: Any) -> dict[str, Any] | None:
        """Returns Runtime.stats(), or None while the engine does not step.

        A long step keeps the figures from before it; however many scrapes meet it, it is asked once.
        """
        if time.monotonic() - self._read_at > STATS_SECONDS:
            await self._ask(runtime)
        return self._stats if runtime.health().ok else None

    async def _ask(self, runtime: Any) -> None:
        if self._asked is None:
            self._asked = asyncio.ensure_future(runtime.stats())
        asked = self._asked
        done, _ = await asyncio.wait({asked}, timeout=STATS_SECONDS)
        if not done or asked is not self._asked:  # another scrape has read it
            return
        self._asked = None
        if not asked.cancelled() and asked.exception() is None:
            self._stats, self._read_at = asked.result(), time.monotonic()


class MetricsPage:
    """The answers of /metrics of one server, over its books."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._engine = EngineFigures()
        self._process = ProcessCollector(registry=None)

    async def render(self, runtime: Any, *, num_waiting: int = 0, accept: str = "") -> tuple[bytes, str]:
        """Returns the page and its content type, OpenMetrics where the client accepts that.

        runtime: an AsyncRuntime, or None while there is none yet. num_waiting: requests that wait for
        admission to it, ahead of its own queue.
        """
        stats = None if runtime is None else await self._engine.read(runtime)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._process)
        health = None if runtime is None else runtime.health()
        waiting = {"server": num_waiting, "engine": 0 if stats is None else stats["requests"]["waiting"]}
        registry.register(_Scrape(self._metrics, waiting, stats, health))
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type


class _Scrape(Collector):
    """Yields every family of one moment."""

    def __init__(
        self, metrics: Metrics, waiting: dict[str, int], stats: dict[str, Any] | None, health: Any
    ) -> None:
        self._metrics = metrics
        self._waiting = waiting
        self._stats = stats
        self._health = health

    def collect(self) -> Iterator[Metric]:
        """Returns what prometheus-client writes out."""
        yield from self._made(SERVER_FAMILIES, self._metrics)
        if self._stats is not None:
            yield from self._made(QUEUE_FAMILIES, self._waiting)
            yield from self._made(ENGINE_FAMILIES, self._stats)
        if self._health is not None:
            yield from self._made(HEALTH_FAMILIES, self._health)
        else:
            up = GaugeMetricFamily(
                PREFIX + HEALTH_FAMILIES[0].name, HEALTH_FAMILIES[0].help, labels=["model_name"]
            )
            up.add_metric([self._metrics.model_name], 0)
            yield up

    def _made(self, families: Iterable[Family], source: Any) -> Iterator[Metric]:
        return (_family(family, family.read(source), self._metrics.model_name) for family in families)


def _family(family: Family, value: Any, model_name: str) -> Metric:
    """Returns one family with the values it has now, each under the model's name."""
    name, labels = PREFIX + family.name, ["model_name", *family.labels]
    if isinstance(value, Histogram):
        histogram = HistogramMetricFamily(name, family.help, labels=labels)
        histogram.add_metric([model_name], value.cumulative(), value.sum)
        return histogram
    made = (CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily)(
        name, family.help, labels=labels
    )
    for own, count in value.items() if family.labels else [((), value)]:
        made.add_metric([model_name, *own], float(count))
    return made
