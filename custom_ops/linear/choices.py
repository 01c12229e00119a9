"""Which kernel serves a GEMM of few rows: the library's, or one of ours and in what tile configuration.

A choice depends on the shapes, on the number of rows up to the next of BUCKETS, and on the device's name
alone. It comes from measurements: those in measured.json, or those that GEMM autotune (autotune.py) made here
and adopt was given. Nothing is measured while serving; what was not measured is the library's on a GPU, and a
guess on a CPU.
"""

import enum
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from .devices import device_name_of as device_name_of
from .devices import processors_of as processors_of
from .gemm_config import (
    MAX_CLUSTER,
    MAX_STAGES,
    PERSISTENT_TOKENS,
    POWERS,
    bytes_beside_stages,
    checked,
    stage_bytes,
    tiles_of_stage,
)
from .gemm_config import GemmConfig as GemmConfig

Kind = Literal["linear", "quantizing", "gated"]
BYTES = ("fp8", "fp8_block", "int8")  # e4m3 by a scale a row, or a row and 128 columns; whole numbers

QUANTIZING_ROWS, GATED_ROWS = 8, 64  # at most, of weights in one byte, where a kernel does both
SHARES_PEAKS, PACED = 1, 2  # clusters of a config that quantizes, a sum; kernel.cuh of linear_w8a8 has both
BUCKETS = (1, 8, 16, 32, 64, 128, 256)  # rows; above, the library reaches the limit of the tensor cores
# Rows beyond, of weights in one byte: there it does not; and of prompts where the gate is part of the GEMM.
MANY = (512, 2048, 8192)  # above, the last one's choice holds
PROMPT_ROWS, FULL = 256, 0.97  # of a prompt a tile takes, of which so many must be there
MAX_SHARED = 227 << 10  # bytes a processor
# Blocks that a processor has room for, by as many stages as then fit; a guess takes the first. Of few rows
# small blocks find room, and ask for weights, while the kernels ahead still have most of a processor.
FEW_ROWS, ROOM_OF_FEW, ROOM = 16, (2, 1, 4, 3), (2, 1)
# Persistent kernels. Of larger clusters a GPU of 132 has no room for enough: 30 of four, 15 of eight.
PERSISTENT_CLUSTERS = (1, 2), (2, 1)  # multicast, split_k: of the two blocks of a cluster
# Up to so many rows a kernel that starts early (PDL) gains more between others than in a benchmark of itself
# alone; above, a few percent there were a loss in a whole step.
BOUND_BY_MEMORY, CLEARLY = 64, 0.97
# In FP8 torch's GEMM loses 1 to 3 us more than ours behind a norm (H200), as it starts when that has ended.
AMID_OTHERS = 1.03
# A projection of gate and up without its gate has adapters behind it: behind the library's GEMM those start
# late, too, with all that they read ahead otherwise. Of what is lost at both ends this is a cautious part.
AMID_ADAPTERS = 1.05
CLOSE = 1.15  # on a CPU, where other processes disturb: the library must win by more
DISTURBED = 1.5  # times of one kernel, the median over the best, from which something else was running
# Blocks a processor: fewer leave memory idle; more need no split-K, but for few rows in bytes.
FEWEST, MOST_SPLIT, MOST_SPLIT_OF_FEW = Fraction(5, 11), Fraction(25, 11), Fraction(9, 2)
EVEN_HALVES = 256  # columns: of halves that are whole steps of every kernel
MEASURED = Path(__file__).with_name("measured.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A GEMM, x @ weight.T, as far as a choice depends on it."""

    kind: Kind  # alone, with what quantizes x in the same kernel, or with silu_and_mul behind it
    num_tokens: int  # one of BUCKETS, or of MANY
    n: int  # rows of the weights
    k: int
    dtype: str = "bfloat16"  # of x
    weights: str = "dense"  # how they are kept: dense, of x's dtype, or as BYTES names them
    split_k: int = 0  # by which any number of rows is to be summed, for the same bits; 0: none

    @property
    def is_in_bytes(self) -> bool:
        """Whether both operands are of one byte an element, with scales."""
        return self.weights in BYTES

    @property
    def tile_columns(self) -> int:
        """Columns of K in a tile: 128 bytes."""
        return 128 if self.is_in_bytes else 64

    def __str__(self) -> str:
        kept = "" if self.weights == "dense" else f" {self.weights}"
        order = f" by split-K {self.split_k}" if self.split_k else ""
        return f"{self.kind} [{self.n}, {self.k}]{kept} in {self.dtype} up to {self.num_tokens} rows{order}"


class Method(enum.Enum):
    """The GEMM kernels on a CPU."""

    DOT = "dot"  # dot products along the rows of weights, by vector instructions
    AMX = "amx"  # AMX tiles, where a CPU has them


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What was measured of a site: the fastest kernel of ours with its time, and `otherwise`, that of the
    library or of the ops the site stands for, one after another.

    kernel None: whole steps were faster without, whatever a benchmark of the GEMM alone says. spread: median
    of the times over the best one; well above 1 something else was running.
    """

    site: Site
    kernel: GemmConfig | Method | None
    microseconds: float
    otherwise: float
    spread: float = 1.0

    @property
    def is_doubtful(self) -> bool:
        """Whether other work may have decided what was found."""
        return self.spread > DISTURBED

    def to_json(self) -> list[Any]:
        """One line of a file of measurements."""
        site = self.site
        shape = [site.kind, site.num_tokens, site.n, site.k, site.dtype, site.weights]
        kernel = self.kernel.value if isinstance(self.kernel, Method) else self.kernel and [*self.kernel]
        more = [site.split_k, self.spread] if self.spread != 1.0 else [site.split_k] if site.split_k else []
        return [*shape, kernel, self.microseconds, self.otherwise, *more]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What serves a site: a configuration of the CUDA kernels, a method of a CPU, or None for the library."""

    kernel: GemmConfig | Method | None
    reason: str
    is_measured: bool = True


_adopted: dict[tuple[str, Site], Entry] = {}  # by device
_lookups: list[Any] = []
Lookup = TypeVar("Lookup", bound=Callable[..., Any])


def cached_until_adopted(lookup: Lookup) -> Lookup:
    """functools.cache that begins anew whenever measurements are adopted."""
    cached: Any = functools.cache(lookup)
    _lookups.append(cached)
    return cached  # type: ignore[no-any-return]


def parse_entry(line: Iterable[Any]) -> Entry:
    """What Entry.to_json wrote. Raises ValueError or TypeError for anything else."""
    kind, num_tokens, n, k, dtype, weights, kernel, microseconds, otherwise, *more = line
    if len(more) > 2:
        raise ValueError(f"{more} is no split-K and spread")
    split_k, spread = more[0] if more else 0, more[1] if len(more) > 1 else 1.0
    if split_k and (split_k not in POWERS or kernel is None or GemmConfig(*kernel).split_k != split_k):
        raise ValueError(f"{kernel} does not divide columns by {split_k}")
    return Entry(
        site=Site(kind=kind, num_tokens=num_tokens, n=n, k=k, dtype=dtype, weights=weights, split_k=split_k),
        kernel=Method(kernel) if isinstance(kernel, str) else kernel and checked(GemmConfig(*kernel)),
        microseconds=float(microseconds),
        otherwise=float(otherwise),
        spread=float(spread),
    )


def adopt(device_name: str, entries: Iterable[Entry]) -> None:
    """Let later choices for a device follow these measurements, before any that are shipped."""
    _adopted.update({(device_name, entry.site): entry for entry in entries})
    for lookup in _lookups:
        lookup.cache_clear()


def sites_of(
    op: str, n: int, k: int, dtype: str = "bfloat16", weights: str = "dense", split_k: int = 0
) -> tuple[Site, ...]:
    """The sites of a GEMM, one for each bucket of rows; op as a Gemm's kind, of compiler/passes/gemms.py."""
    one = Site(kind="linear", num_tokens=1, n=n, k=k, dtype=dtype, weights=weights, split_k=split_k)
    buckets = (*BUCKETS, *MANY) if one.is_in_bytes else BUCKETS
    alone = tuple(replace(one, num_tokens=bucket) for bucket in buckets)
    with_gate = [site for site in alone if not one.is_in_bytes or site.num_tokens <= GATED_ROWS]
    gated = tuple(replace(site, kind="gated") for site in with_gate)
    quantizing = [replace(site, kind="quantizing") for site in alone if site.num_tokens <= QUANTIZING_ROWS]
    more = {"norm_gated": gated, "linear_gated": gated, "gated": gated, "quantizing": quantizing}.get(op, ())
    return (*more,) if op == "gated" else (*alone, *more)


def is_measured(site: Site, device_name: str) -> bool:
    """Whether there are figures of a site."""
    return _find_entry(site, device_name) is not None


def _find_entry(site: Site, device_name: str) -> Entry | None:
    """What was measured of a site; of a given split-K first what serves without, where that splits so, too.

    That may have been chosen by whole steps, where a benchmark of one GEMM says little.
    """
    sites = [(device_name, replace(site, split_k=0)), (device_name, site)]
    plain, own = (_adopted.get(key) or shipped().get(key) for key in sites)
    return plain if plain is not None and _splits_all(plain.kernel, site.split_k) else own


def _splits_all(kernel: GemmConfig | Method | None, split_k: int) -> bool:
    """Whether a configuration divides the columns of all tiles so; a persistent one may do some of them."""
    if isinstance(kernel, GemmConfig) and kernel.split_k == split_k:
        return split_k == 1 or not kernel.is_persistent
    return False


def candidates(site: Site, num_processors: int) -> tuple[GemmConfig, ...]:
    """The configurations worth measuring on so many multiprocessors, with as many stages as memory takes."""
    found = []
    splits = (site.split_k,) if site.split_k else POWERS
    most = MOST_SPLIT_OF_FEW if site.is_in_bytes and site.num_tokens <= FEW_ROWS else MOST_SPLIT
    for warpgroups, tokens, split_k in itertools.product((1, 2, 4), _tile_tokens(site), splits):
        width, rows = (site.n // 2, warpgroups * 32) if site.kind == "gated" else (site.n, warpgroups * 64)
        blocks = ceil_div(width, rows) * ceil_div(site.num_tokens, tokens) * split_k
        many = split_k > 1 and blocks > most * num_processors
        few = split_k < MAX_CLUSTER and blocks < FEWEST * num_processors
        if (not site.split_k and (many or few)) or not _is_compiled(site, warpgroups, tokens):
            continue
        rooms = ROOM_OF_FEW if site.num_tokens <= FEW_ROWS else ROOM
        limits = [MAX_SHARED // room for room in rooms]
        stages = dict.fromkeys(most_stages(site, warpgroups, tokens, split_k, limit) for limit in limits)
        for multicast, num_stages in itertools.product(_multicasts(tokens), stages):
            if num_stages is not None and multicast * split_k <= MAX_CLUSTER:
                found.append(GemmConfig(warpgroups, tokens, multicast, split_k, num_stages))
    if site.kind == "linear" or not site.is_in_bytes:
        return (*found, *persistent_candidates(site, num_processors))
    divided = [config for config in found if config.split_k > 1 and site.weights != "fp8_block"]
    sharing = [config._replace(clusters=SHARES_PEAKS) for config in divided]
    return (*found, *sharing) if site.kind == "quantizing" else tuple(found)


def persistent_candidates(site: Site, num_processors: int) -> tuple[GemmConfig, ...]:
    """The persistent kernel's configurations worth measuring: a grid that the GPU holds at once."""
    pairs, is_many = num_processors // 2, site.num_tokens in MANY
    if pairs == 0 or site.num_tokens < PERSISTENT_TOKENS[0] or site.n % (16 if site.kind == "gated" else 8):
        return ()
    grids = (pairs,) if is_many else dict.fromkeys((pairs // 8 * 8 or pairs, pairs))
    return tuple(
        GemmConfig(warpgroups, tokens, *cluster, persistent_stages(warpgroups, tokens), clusters)
        for warpgroups, tokens, cluster in itertools.product((1, 2), PERSISTENT_TOKENS, PERSISTENT_CLUSTERS)
        for clusters in grids
        if (warpgroups == 2 or (cluster == (1, 2) and not is_many))
        and tokens <= site.num_tokens
        and site.split_k in (0, cluster[1])
    )


def persistent_stages(warpgroups: int, tokens: int) -> int:
    """Pipeline stages that fit, persistent kernel; csrc/include/persistent_shape.cuh counts the same."""
    return (MAX_SHARED - 2048) // (warpgroups * 8192 + tokens * 128)


def one_order(n: int, k: int, num_processors: int) -> int:
    """The split-K by which a weight's products are summed, whatever the number of rows.

    2 where a block for every 64 weight rows would leave half of the processors idle, and all kernels cut the
    columns in the same place.
    """
    return 2 if 2 * ceil_div(n, 64) <= num_processors and k % EVEN_HALVES == 0 else 1


def guess(site: Site, num_processors: int) -> GemmConfig | None:
    """A configuration that is never far off, for what has no library; None where none serves."""
    persistent = persistent_candidates(site, num_processors)
    if persistent:
        return max(persistent, key=lambda c: (c.warpgroups, c.tile_tokens, c.multicast, c.clusters))
    alone = [config for config in candidates(site, num_processors) if config.multicast == 1]
    rows = [ceil_div(site.n, 64 * config.warpgroups) * config.split_k for config in alone]
    waves = [abs(blocks / num_processors - 1.5) for blocks in rows]  # two blocks a processor, or nearly
    return alone[waves.index(min(waves))] if alone else None


def _is_compiled(site: Site, warpgroups: int, tokens: int) -> bool:
    paired = site.kind != "gated" or warpgroups > 1
    return paired and (warpgroups < 4 or tokens in ((64,) if site.is_in_bytes else (64, 128)))


def _tile_tokens(site: Site) -> tuple[int, ...]:
    if site.num_tokens in MANY:
        return ()  # for persistent kernels alone
    if site.num_tokens == BUCKETS[-1]:
        return (128,) if site.is_in_bytes else (128, 256)  # of FP8 sums are kept twice
    return (max(8, site.num_tokens),)


def _multicasts(tokens: int) -> tuple[int, ...]:
    if tokens < 16:
        return (1,)
    return (1, 2) if tokens < 64 else (1, 2, 4)


def most_stages(site: Site, warpgroups: int, tokens: int, split_k: int, limit: int) -> int | None:
    """Pipeline stages that are of use and fit into so many bytes of shared memory; None where two do not.

    csrc/include/split_k_shape.cuh counts the same bytes.
    """
    steps = ceil_div(ceil_div(site.k, site.tile_columns * tiles_of_stage(tokens)), split_k)
    sums = (warpgroups * 64 + 4) * tokens * 4
    free = limit - bytes_beside_stages(warpgroups, tokens)
    stages = min(free // stage_bytes(warpgroups, tokens), MAX_STAGES, max(2, steps))
    return stages if stages >= 2 and sums <= free else None


def kept_as(dtype: torch.dtype, scale_dims: int) -> str:
    """How weights of one byte with such scales are called."""
    return "int8" if dtype == torch.int8 else BYTES[scale_dims - 1]


def ceil_div(count: int, size: int) -> int:
    """count / size, rounded up."""
    return -(-count // size)


def bucket_of(num_tokens: int) -> int | None:
    """The number of rows that a choice is made for, None above all."""
    return next((bucket for bucket in BUCKETS if num_tokens <= bucket), None)


def bucket_of_bytes(num_tokens: int) -> int:
    """The same for weights in one byte, of which there is a choice for any number."""
    return bucket_of(num_tokens) or next((bucket for bucket in MANY if num_tokens <= bucket), MANY[-1])


def bucket_of_prompt(num_tokens: int) -> int | None:
    """The one of MANY for a gate and what it gates; None where too many rows of its last tiles are empty."""
    if num_tokens < FULL * PROMPT_ROWS * ceil_div(num_tokens, PROMPT_ROWS):
        return None
    return next((bucket for bucket in MANY if num_tokens <= bucket), MANY[-1])


@cached_until_adopted
def choose(site: Site, device_name: str) -> Choice:
    """What serves a site on a device."""
    entry = _find_entry(site, device_name)
    if entry is None:
        return Choice(kernel=None, reason=f"not measured on {device_name}", is_measured=False)
    here = "here" if (device_name, entry.site) in _adopted else f"on {device_name}"
    reason = f"measured {here}: {entry.microseconds:.1f} us, otherwise {entry.otherwise:.1f} us"
    if entry.is_doubtful:
        reason += f", beside other work: the median was {entry.spread:.1f} times the best"
    if entry.kernel is None:
        reason += ", but whole steps gain from that"
    limit = entry.otherwise * (AMID_ADAPTERS if _is_amid_adapters(site, device_name) else allowance(entry))
    is_taken = entry.microseconds < limit or site.split_k
    return Choice(kernel=entry.kernel if is_taken else None, reason=reason)


def _is_amid_adapters(site: Site, device_name: str) -> bool:
    """Whether it is a GEMM of few rows for which there are figures of the same with a gate behind it."""
    is_few = site.num_tokens <= BOUND_BY_MEMORY and site.kind == "linear" and not site.is_in_bytes
    return is_few and is_measured(replace(site, kind="gated"), device_name)


def allowance(entry: Entry) -> float:
    """How much of the other way's time a kernel of ours may take to be chosen."""
    if isinstance(entry.kernel, Method):
        return CLOSE
    if entry.site.is_in_bytes and entry.site.kind == "linear":
        return AMID_OTHERS
    return 1.0 if entry.site.num_tokens <= BOUND_BY_MEMORY else CLEARLY


@functools.cache
def shipped() -> Mapping[tuple[str, Site], Entry]:
    """The measurements that come with the package."""
    devices: dict[str, list[Any]] = json.loads(MEASURED.read_text())
    entries = [(name, parse_entry(line)) for name, lines in devices.items() for line in lines]
    return {(name, entry.site): entry for name, entry in entries}


@functools.cache
def name_of(dtype: torch.dtype) -> str:
    """A dtype's name as sites have it."""
    return str(dtype).removeprefix("torch.")
