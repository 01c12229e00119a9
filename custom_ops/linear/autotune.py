"""GEMM autotune: measures the sites of which nothing is known, once, before any CUDA graph is captured."""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...common.errors import KernelLaunchError
from ...common.logging import get_logger
from .._shared.fp8 import FP8
from .._shared.quantized import GROUP, INT8, num_groups
from ..add_rms_norm_linear import _composed
from ..add_rms_norm_linear import _cpu as fused_cpu
from ..linear_silu_and_mul import _cuda as with_gate
from ..linear_w4a16 import _cuda as four_bits
from ..linear_w4a16 import configs as four_bit_configs
from ..linear_w8a8 import _composed as composed_few
from ..linear_w8a8 import _cuda as few_rows
from ..mlp_w8a8 import _composed as composed_mlp
from ..mlp_w8a8 import _cuda as mlp_kernel
from ..scaled_linear import _cuda as scaled
from . import _cpu as plain_cpu
from . import _cuda as plain
from .choices import (
    Entry,
    GemmConfig,
    Method,
    Site,
    adopt,
    candidates,
    ceil_div,
    device_name_of,
    guess,
    processors_of,
)

OPS = torch.ops.lamina
logger = get_logger("custom_ops")
Stream: Any = torch.cuda.Stream  # torch leaves them without types
Event: Any = torch.cuda.Event
ROTATED_BYTES = 160 << 20  # of weights that a measurement goes through: they must come from device memory
MIN_CALLS, REPEATS = 8, 3
# On a CPU: seconds that the rounds of a site take at most, and how near its best a call must come again.
RACE_TAKES, SETTLED = 0.5, 1.05
IN_ORDER = ("linear", "quantizing", "gated")  # each after the GEMMs that it has, or is compared with


def autotune(sites: Iterable[Site], device: torch.device, dtype: torch.dtype) -> tuple[Entry, ...]:
    """One entry for each site, measured on a device and adopted; takes some tenths of a second a site.

    Must not run while a CUDA graph is captured or other work is under way.
    """
    entries = []
    by_shape = sorted(sites, key=lambda site: (IN_ORDER.index(site.kind), site.n, site.k))
    for site in by_shape:
        measured = _measure(site, device, dtype) if device.type == "cuda" else _measure_on_cpu(site, dtype)
        entries.append(measured)
        adopt(device_name_of(device, dtype), entries[-1:])
    _weights.cache_clear()
    return tuple(entries)


class Ways(NamedTuple):
    """What multiplies a site's x by a weight of the list: the kernel of a configuration, and the library."""

    weights: list[Any]
    ours: Callable[[GemmConfig, Any], Tensor]
    library: Callable[[Any], Tensor]


class ScaledWeight(NamedTuple):
    """Weights in fewer bits, and their scales, as a kernel takes them."""

    values: Tensor
    scale: Tensor

    @property
    def device(self) -> torch.device:
        return self.values.device


class MlpWeights(NamedTuple):
    """Weights of an MLP in one byte, and their scales."""

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor

    @property
    def device(self) -> torch.device:
        return self.gate_up.device


def candidates_of(site: Site, num_processors: int) -> tuple[GemmConfig, ...]:
    """The configurations worth measuring on so many multiprocessors, whatever the weights."""
    group = four_bit_configs.group_of(site)
    if group is None:
        return candidates(site, num_processors)
    return four_bit_configs.candidates(site, group, num_processors)


def ways_of(site: Site, device: torch.device, dtype: torch.dtype) -> Ways:
    """Both ways of a site, with random operands."""

    def random(*shape: int) -> Tensor:
        values: Tensor = torch.randn(shape, device=device, dtype=dtype) / site.k**0.25
        return values

    x, group = random(site.num_tokens, site.k), four_bit_configs.group_of(site)
    if group is not None:
        return _four_bit_ways(site, x, group)
    size = site.n * site.k * (1 if site.is_in_bytes else dtype.itemsize)
    weights = [random(site.n, site.k) for _ in range(ceil_div(ROTATED_BYTES, size))]
    if site.is_in_bytes:
        return _byte_ways(site, x, weights)
    otherwise = F.linear if site.kind == "linear" else _gemm_then_gate
    launch = plain.launch if site.kind == "linear" else with_gate.launch
    return Ways(
        weights,
        lambda config, weight: launch(x, weight, None, config, bool(site.split_k)),
        lambda weight: otherwise(x, weight),
    )


def _byte_ways(site: Site, x: Tensor, weights: list[Tensor]) -> Ways:
    """The same in one byte; where no library takes the operands, a guessed configuration stands for it."""
    grouped, kept = site.weights == "fp8_block", INT8 if site.weights == "int8" else FP8
    values, x_scale = OPS.quantize_rows.default(x, GROUP if grouped else 0, kept)
    scale = x.new_ones((site.n, num_groups(site.k)) if grouped else (site.n,), dtype=torch.float32)
    given = [ScaledWeight(OPS.quantize_rows.default(weight, 0, kept)[0], scale) for weight in weights]

    def ours(config: GemmConfig, weight: ScaledWeight) -> Tensor:
        return scaled.launch(values, x_scale, *weight, None, x.dtype, config)

    def library(weight: ScaledWeight) -> Tensor:
        return scaled.library(values, x_scale, *weight, None, x.dtype)

    if site.kind == "quantizing":
        return Ways(
            given,
            lambda config, weight: few_rows.launch(x, weight.values, weight.scale, None, config),
            lambda weight: composed_few.linear_w8a8(x, weight.values, weight.scale),
        )
    if site.kind == "gated":
        return _mlp_ways(site, values, x_scale, given, x.dtype)
    guessed = guess(site, processors_of(x.device))
    has_library = scaled.has_library(site.num_tokens, given[0].values, scale, x.dtype)
    return Ways(given, ours, library if has_library or guessed is None else partial(ours, guessed))


def _mlp_ways(
    site: Site, x: Tensor, x_scale: Tensor, weights: list[ScaledWeight], dtype: torch.dtype
) -> Ways:
    """Both ways of a whole MLP: what its gate gains in one kernel may be what down takes longer by."""
    inner, kept = site.n // 2, x.dtype
    down = torch.randn((site.k, inner), device=x.device, dtype=dtype)
    scale = x_scale.new_ones((site.k, num_groups(inner)) if x_scale.dim() == 2 else (site.k,))
    downs = [OPS.quantize_rows.default(down, 0, kept)[0] for _ in weights]  # of each gate its own
    pairs = [(*weight, each) for weight, each in zip(weights, downs, strict=True)]
    given = [MlpWeights(*pair, scale) for pair in pairs]

    def ours(config: GemmConfig, mlp: MlpWeights) -> Tensor:
        gated = mlp_kernel.launch(x, x_scale, mlp.gate_up, mlp.gate_up_scale, None, dtype, config)
        out: Tensor = OPS.linear_w8a8.default(gated, mlp.down, mlp.down_scale)
        return out

    def apart(mlp: MlpWeights) -> Tensor:
        first, second = (mlp.gate_up, mlp.gate_up_scale, None), (mlp.down, mlp.down_scale, None)
        return composed_mlp.mlp_w8a8(x, x_scale, *first, *second, dtype)

    return Ways(given, ours, apart)


def _four_bit_ways(site: Site, x: Tensor, group: int) -> Ways:
    """The same in four bits, or eight; the library multiplies by weights that are written out for it."""
    scale = x.new_ones((site.n, 1 if group < 0 else ceil_div(site.k, group)))
    is_wide = four_bit_configs.bits_of(site.weights) == 8
    columns = site.k if is_wide else site.k // 2

    def random() -> Tensor:
        weight = torch.randint(0, 256, (site.n, columns), dtype=torch.uint8, device=x.device)
        return weight.view(torch.int8) if is_wide else weight

    # Random bits are as good as any.
    given = [ScaledWeight(random(), scale) for _ in range(ceil_div(ROTATED_BYTES, site.n * columns))]
    gated = site.kind == "gated"

    def ours(config: GemmConfig, weight: ScaledWeight) -> Tensor:
        return four_bits.launch(x, *weight, None, None, group, config, gated=gated)

    def library(weight: ScaledWeight) -> Tensor:
        return four_bits.by_library(x, *weight, None, None, group, gated=gated)

    return Ways(given, ours, library)


def _measure(site: Site, device: torch.device, dtype: torch.dtype) -> Entry:
    ways = ways_of(site, device, dtype)
    library = _microseconds(ways.library, ways.weights)
    taken: dict[GemmConfig, float] = {}
    for config in candidates_of(site, processors_of(device)):
        try:
            taken[config] = _microseconds(partial(ways.ours, config), ways.weights)
        except KernelLaunchError as error:  # a part of a GPU has no room for some clusters
            logger.warning("%s is not tried for %s: %s", config, site, error)
    if not taken:
        return Entry(site=site, kernel=None, microseconds=library, otherwise=library)
    best = min(taken, key=lambda config: taken[config])
    return Entry(site=site, kernel=best, microseconds=taken[best], otherwise=library)


def _gemm_then_gate(x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = OPS.silu_and_mul.default(OPS.linear.default(x, weight, None))
    return result


def _microseconds(call: Callable[[Any], object], weights: list[Any]) -> float:
    """Median time of a call, in a CUDA graph that goes through all weights."""
    stream = Stream(weights[0].device)
    sequence = [weights[i % len(weights)] for i in range(max(MIN_CALLS, len(weights)))]
    with torch.cuda.stream(stream):
        call(weights[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        # torch.cuda.graph would collect garbage at every measurement; other threads may allocate meanwhile
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for weight in sequence:
                call(weight)
        finally:
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


def _measure_on_cpu(site: Site, dtype: torch.dtype) -> Entry:
    weights = _weights(site.n, site.k, dtype)
    x, residual = (torch.randn(site.num_tokens, site.k).to(dtype) for _ in range(2))
    norm = x, residual, torch.ones(site.k, dtype=dtype), 1e-5

    def ours(method: Method, weight: Tensor) -> object:
        if site.kind == "linear":
            return plain_cpu.launch(x, weight, None, method)
        return fused_cpu.launch(*norm, weight, None, True, method)

    def otherwise(weight: Tensor) -> object:
        if site.kind == "linear":
            return F.linear(x, weight)
        return _composed.add_rms_norm_linear(*norm, weight, None, True)

    ways = plain_cpu.ways(dtype, site.num_tokens)
    times = _race([otherwise if way is None else partial(ours, way) for way in ways], weights)
    found = dict(zip(ways, times, strict=True))
    best = min((way for way in ways if way is not None), key=lambda way: found[way].best)
    return Entry(
        site=site,
        kernel=best,
        microseconds=found[best].best,
        otherwise=min(time.best for way, time in found.items() if way is not best),
        spread=max(time.spread for time in times),
    )


@functools.lru_cache(maxsize=1)  # the sites of a shape come one after another
def _weights(rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    weight = torch.randn(rows, columns).to(dtype) / columns**0.5
    return [weight.clone() for _ in range(ceil_div(ROTATED_BYTES, weight.nbytes))]


class Times(NamedTuple):
    """What a call took, in microseconds: the best of its times, and their median over that."""

    best: float
    spread: float


def _race(
    calls: list[Callable[[Tensor], object]],
    weights: list[Tensor],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Times]:
    """What each call takes, in rounds of all of them: what else runs must not decide.

    They end once the best time of each was reached again, nearly, or when they have taken long.
    """
    following = itertools.cycle(weights)

    def microseconds(call: Callable[[Tensor], object]) -> float:
        started = clock()
        call(next(following))
        return (clock() - started) * 1e6

    end = clock() + RACE_TAKES
    for call in calls:  # the first time, which prepares as well
        microseconds(call)
    taken: list[list[float]] = [[] for _ in calls]
    while len(taken[0]) < REPEATS or (clock() < end and not all(map(_is_settled, taken))):
        for call, times in zip(calls, taken, strict=True):
            times.append(microseconds(call))
    return [Times(min(times), statistics.median(times) / min(times)) for times in taken]


def _is_settled(times: list[float]) -> bool:
    return sorted(times)[REPEATS - 1] < SETTLED * min(times)
