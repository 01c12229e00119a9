"""Measures the sites of products that no figures are known of, once, before anything is captured."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..add_rms_norm_linear import _cuda as fused
from . import _cuda as plain
from .choices import Cut, Entry, Site, adopt, candidates, card_of

OPS = torch.ops.lamina
EPS = 1e-5
Stream: Any = torch.cuda.Stream  # torch leaves them without types
Event: Any = torch.cuda.Event
ROTATED_BYTES = 160 << 20  # of weights that a measurement goes through: they must come from device memory
MIN_CALLS, REPEATS = 8, 3


def tune(sites: Iterable[Site], device: torch.device, dtype: torch.dtype) -> tuple[Entry, ...]:
    """What was measured of sites on a device, adopted already; takes some tenths of a second a site.

    Must not run while a graph is captured or other work is under way.
    """
    entries = []
    order = ("linear", "gated", "norm", "norm_gated")  # each may be the other way of a later one
    for site in sorted(sites, key=lambda site: order.index(site.kind)):
        entries.append(_measure(site, _make_inputs(site, device, dtype)))
        adopt(card_of(device), entries[-1:])
    return tuple(entries)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inputs:
    x: Tensor
    residual: Tensor
    norm_weight: Tensor
    weights: list[Tensor]


def _make_inputs(site: Site, device: torch.device, dtype: torch.dtype) -> _Inputs:
    def random(*shape: int) -> Tensor:
        values: Tensor = torch.randn(shape, device=device, dtype=dtype) / site.k**0.25
        return values

    count = -(-ROTATED_BYTES // (site.n * site.k * dtype.itemsize))
    return _Inputs(
        x=random(site.num_tokens, site.k),
        residual=random(site.num_tokens, site.k),
        norm_weight=random(site.k),
        weights=[random(site.n, site.k) for _ in range(count)],
    )


def _measure(site: Site, inputs: _Inputs) -> Entry:
    otherwise = _microseconds(lambda weight: _otherwise(site, inputs, weight), inputs.weights)
    run = _runner(site, inputs)
    taken = {cut: _microseconds(partial(run, cut), inputs.weights) for cut in candidates(site)}
    best = min(taken, key=lambda cut: taken[cut])
    return Entry(site=site, cut=best, microseconds=taken[best], otherwise=otherwise)


def _otherwise(site: Site, inputs: _Inputs, weight: Tensor) -> Tensor:
    """The site by the ops that it stands for."""
    x = inputs.x
    if site.kind.startswith("norm"):
        x, _ = OPS.add_rms_norm.default(x, inputs.residual, inputs.norm_weight, EPS)
    if site.kind == "linear":
        return F.linear(x, weight)
    return fused.behind_norm(x, weight, None, site.kind != "norm")


def _runner(site: Site, inputs: _Inputs) -> Callable[[Cut, Tensor], object]:
    """The site by the streaming kernel."""
    if site.kind == "linear":
        return lambda cut, weight: plain.launch(inputs.x, weight, None, cut)
    if site.kind == "gated":
        return lambda cut, weight: fused.gate(inputs.x, weight, None, cut)
    gated = site.kind == "norm_gated"
    given = inputs.x, inputs.residual, inputs.norm_weight, EPS
    return lambda cut, weight: fused.launch(*given, weight, None, gated, cut)


def _microseconds(call: Callable[[Tensor], object], weights: list[Tensor]) -> float:
    """Median time of a call, in a graph that goes through all weights."""
    stream = Stream(weights[0].device)
    sequence = [weights[i % len(weights)] for i in range(max(MIN_CALLS, len(weights)))]
    with torch.cuda.stream(stream):
        call(weights[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin()  # torch.cuda.graph would collect garbage at every measurement
        for weight in sequence:
            call(weight)
        graph.capture_end()
    times: list[float] = []
    for _ in range(REPEATS + 1):
        start, end = (Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            start.record()
            graph.replay()
            end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(sequence))
    return statistics.median(times[1:])
