"""Which implementation serves a product of few rows: the library's, or one of our kernels and in what cut.

A choice depends on the shapes, on the number of rows up to the next of BUCKETS, and on the device's name
alone. It comes from measurements: those in measured.json, or those that tune made here and adopt was given.
Nothing is measured while serving; what was not measured is the library's on a card, and a guess on a CPU.
"""

import enum
import functools
import itertools
import json
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch

Kind = Literal["linear", "gated"]

BUCKETS = (1, 8, 16, 32, 64, 128, 256)  # rows; above, the library reaches the limit of the matrix units
MAX_SHARED, MAX_CLUSTER = 227 << 10, 8  # bytes a processor, blocks; of compute capability 9.0
MAX_STAGES = 24  # of the kernel
POWERS = (1, 2, 4, 8)  # blocks of a cluster that share out work evenly
# Persistent kernels. Of larger clusters a GPU of 132 has no room for enough: 30 of four, 15 of eight.
RESIDENT_TOKENS = (128, 256)
RESIDENT_CLUSTERS = (1, 2), (2, 1)  # share, split: of the two blocks of a cluster
# Up to so many rows a kernel that begins early gains between others more than in a row of its like; above, a
# few percent in such a row were a loss in a whole step.
BOUND_BY_MEMORY, CLEARLY = 64, 0.97
CLOSE = 1.15  # on a CPU, where other processes disturb: the library must win by more
# Blocks a processor: fewer leave memory idle; more need not share out columns.
FEWEST, MOST_SPLIT = Fraction(5, 11), Fraction(25, 11)
MEASURED = Path(__file__).with_name("measured.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A product as far as a choice depends on it."""

    kind: Kind  # alone, or with silu_and_mul behind it
    num_tokens: int  # one of BUCKETS
    n: int  # rows of the weights
    k: int
    dtype: str = "bfloat16"  # of x
    weights: str = "dense"  # how they are kept: dense, of x's dtype

    def __str__(self) -> str:
        kept = "" if self.weights == "dense" else f" {self.weights}"
        return f"{self.kind} [{self.n}, {self.k}]{kept} in {self.dtype} up to {self.num_tokens} rows"


class Cut(NamedTuple):
    """How the streaming kernel cuts a product into blocks; csrc/include/stream_launch.cuh has the same."""

    groups: int  # of 64 weight rows, a block
    tokens: int  # rows of x, a block
    share: int  # blocks that hand each other the tiles of x
    split: int  # blocks that share out the columns of the same weight rows
    stages: int  # tiles of 64 columns in flight
    clusters: int = 0  # that stay and take one tile of weight rows after the other; 0: a cluster for each


class Method(enum.Enum):
    """How a kernel on a CPU multiplies."""

    DOTS = "dots"  # vectors along the rows of weights
    TILES = "tiles"  # the tile unit of CPUs that have one


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What was measured of a site: the best cut or method, and the best time without it, which is that of
    the library or of the ops the site stands for, one after another. No cut: whole steps were faster without,
    whatever rows of the same product say."""

    site: Site
    cut: Cut | Method | None
    microseconds: float
    otherwise: float

    def to_json(self) -> list[Any]:
        """One line of a file of measurements."""
        site = self.site
        shape = [site.kind, site.num_tokens, site.n, site.k, site.dtype, site.weights]
        cut = self.cut.value if isinstance(self.cut, Method) else self.cut and [*self.cut]
        return [*shape, cut, self.microseconds, self.otherwise]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The implementation of a site: a cut of the streaming kernel, a method, or None for the other way."""

    cut: Cut | Method | None
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
    kind, num_tokens, n, k, dtype, weights, cut, microseconds, otherwise = line
    return Entry(
        site=Site(kind=kind, num_tokens=num_tokens, n=n, k=k, dtype=dtype, weights=weights),
        cut=Method(cut) if isinstance(cut, str) else cut and checked(Cut(*cut)),
        microseconds=float(microseconds),
        otherwise=float(otherwise),
    )


def checked(cut: Cut) -> Cut:
    """The cut, if the kernel has it. Raises ValueError for one that would write amiss, or not all."""
    if not all(type(count) is int for count in cut):
        raise ValueError(f"{cut} is not of integers")
    is_even = cut.share in POWERS and cut.split in POWERS and cut.share * cut.split <= MAX_CLUSTER
    if not is_even or cut.groups not in (1, 2, 4) or cut.tokens % (8 * cut.share) or cut.tokens <= 0:
        raise ValueError(f"{cut} is none of the kernel's")
    if not 2 <= cut.stages <= MAX_STAGES or cut.clusters < 0:
        raise ValueError(f"{cut} is none of the kernel's")
    return cut


def adopt(card: str, entries: Iterable[Entry]) -> None:
    """Let later choices for a device follow these measurements, before any that are shipped."""
    _adopted.update({(card, entry.site): entry for entry in entries})
    for lookup in _lookups:
        lookup.cache_clear()


def sites_of(op: str, n: int, k: int, dtype: str = "bfloat16") -> tuple[Site, ...]:
    """Every site that a product comes to, with any number of rows; op is linear, norm or norm_gated."""
    alone = tuple(Site(kind="linear", num_tokens=bucket, n=n, k=k, dtype=dtype) for bucket in BUCKETS)
    gated = tuple(replace(site, kind="gated") for site in alone)
    return (*alone, *gated) if op == "norm_gated" else alone


def is_measured(site: Site, card: str) -> bool:
    """Whether there are figures of a site."""
    return (card, site) in _adopted or (card, site) in shipped()


def candidates(site: Site, num_processors: int) -> tuple[Cut, ...]:
    """The cuts worth measuring: enough blocks for so many processors, and as many stages as memory takes."""
    found = []
    for groups, tokens, split in itertools.product((1, 2, 4), _block_tokens(site), (1, 2, 4, 8)):
        width, rows = (site.n // 2, groups * 32) if site.kind == "gated" else (site.n, groups * 64)
        blocks = ceil_div(width, rows) * ceil_div(site.num_tokens, tokens) * split
        many = split > 1 and blocks > MOST_SPLIT * num_processors
        few = split < MAX_CLUSTER and blocks < FEWEST * num_processors
        if many or few or not _is_compiled(site, groups, tokens):
            continue
        limits = (MAX_SHARED // 2, MAX_SHARED)  # two blocks a processor, or one
        stages = dict.fromkeys(most_stages(site, groups, tokens, split, limit) for limit in limits)
        for share, num_stages in itertools.product(_shares(tokens), stages):
            if num_stages is not None and share * split <= MAX_CLUSTER:
                found.append(Cut(groups, tokens, share, split, num_stages))
    return (*found, *resident_candidates(site, num_processors))


def resident_candidates(site: Site, num_processors: int) -> tuple[Cut, ...]:
    """The cuts of persistent blocks, as many as there is room for at once, that are worth measuring."""
    pairs = num_processors // 2
    if pairs == 0 or site.num_tokens not in RESIDENT_TOKENS or site.n % (16 if site.kind == "gated" else 8):
        return ()
    return tuple(
        Cut(groups, tokens, *cluster, resident_stages(groups, tokens), clusters)
        for groups, tokens, cluster in itertools.product((1, 2), RESIDENT_TOKENS, RESIDENT_CLUSTERS)
        for clusters in dict.fromkeys((pairs // 8 * 8 or pairs, pairs))
        if (groups == 2 or cluster == (1, 2)) and tokens <= site.num_tokens
    )


def resident_stages(groups: int, tokens: int) -> int:
    """As many as fit, of a persistent kernel; csrc/include/resident_shape.cuh counts the same."""
    return (MAX_SHARED - 2048) // (groups * 8192 + tokens * 128)


def _is_compiled(site: Site, groups: int, tokens: int) -> bool:
    paired = site.kind != "gated" or groups > 1
    return paired and (groups < 4 or tokens in (64, 128))


def _block_tokens(site: Site) -> tuple[int, ...]:
    return {1: (8,), 256: (128, 256)}.get(site.num_tokens, (site.num_tokens,))


def _shares(tokens: int) -> tuple[int, ...]:
    if tokens < 16:
        return (1,)
    return (1, 2) if tokens < 64 else (1, 2, 4)


def most_stages(site: Site, groups: int, tokens: int, split: int, limit: int) -> int | None:
    """As many as are of use and fit into so many bytes of shared memory; None where two do not.

    csrc/include/stream_shape.cuh counts the same bytes.
    """
    tiles = 2 if tokens <= 32 else 1
    steps = ceil_div(ceil_div(site.k, 64 * tiles), split)
    stage = tiles * (groups * 8192 + tokens * 128)
    sums = (groups * 64 + 4) * tokens * 4
    sent = groups * 64 * tokens * 4 if tokens <= 32 else 0
    free = limit - 2048 - sent  # 2048: to align tiles, for barriers, and what the system takes of each block
    stages = min(free // stage, MAX_STAGES, max(2, steps))
    return stages if stages >= 2 and sums <= free else None


def ceil_div(count: int, size: int) -> int:
    """How many of a size hold so many."""
    return -(-count // size)


def bucket_of(num_tokens: int) -> int | None:
    """The number of rows that a choice is made for, None above all."""
    return next((bucket for bucket in BUCKETS if num_tokens <= bucket), None)


@cached_until_adopted
def choose(site: Site, card: str) -> Choice:
    """The implementation of a site on a card."""
    entry = _adopted.get((card, site)) or shipped().get((card, site))
    if entry is None:
        return Choice(cut=None, reason=f"not measured on {card}", is_measured=False)
    here = "here" if (card, site) in _adopted else f"on {card}"
    reason = f"measured {here}: {entry.microseconds:.1f} us, otherwise {entry.otherwise:.1f} us"
    if entry.cut is None:
        reason += ", but whole steps gain from that"
    limit = entry.otherwise * _allowance(entry)
    return Choice(cut=entry.cut if entry.microseconds < limit else None, reason=reason)


def _allowance(entry: Entry) -> float:
    """How much of the other way's time a kernel of ours may take to be chosen."""
    if isinstance(entry.cut, Method):
        return CLOSE
    return 1.0 if entry.site.num_tokens <= BOUND_BY_MEMORY else CLEARLY


@functools.cache
def shipped() -> Mapping[tuple[str, Site], Entry]:
    """The measurements that come with the package."""
    cards: dict[str, list[Any]] = json.loads(MEASURED.read_text())
    entries = [(card, parse_entry(line)) for card, lines in cards.items() for line in lines]
    return {(card, entry.site): entry for card, entry in entries}


@functools.cache
def processors_of(device: torch.device) -> int:
    """How many multiprocessors a GPU has, or the part of one that this process was given."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def name_of(dtype: torch.dtype) -> str:
    """A dtype's name as sites have it."""
    return str(dtype).removeprefix("torch.")


def card_of(device: torch.device, dtype: torch.dtype) -> str:
    """The name by which measurements know a device, and where it matters what it computes in."""
    if device.type == "cuda":
        return _name_of_card(device)
    return f"{_name_of_cpu()} with {torch.get_num_threads()} threads in {dtype}"


@functools.cache
def _name_of_card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


@functools.cache
def _name_of_cpu() -> str:
    """The model that the system tells, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
