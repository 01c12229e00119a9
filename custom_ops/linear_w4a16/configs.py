"""Which configuration of the CUDA kernel of lamina::linear_w4a16 serves how many rows.

Measured ones come from the same table as those of lamina::linear, under a name of their own for the weights.
A site that nobody measured gets a rule, since writing the weights out for a library's GEMM moves nine times
their bytes.
"""

import itertools
from collections.abc import Iterator

import torch

from ..linear.choices import (
    MAX_SHARED,
    GemmConfig,
    Kind,
    Method,
    Site,
    bucket_of,
    cached_until_adopted,
    ceil_div,
    choose,
    device_name_of,
    name_of,
    processors_of,
)
from ..linear.gemm_config import MAX_CLUSTER, MAX_STAGES
from .layout import GROUPS, TILE

MOST_TOKENS = 128  # rows of x a block
WHOLE_ROW_SHIFT = 30
PREFIXES = {4: "w4a16/", 8: "w8a16/"}  # of how sites name the weights, by their bits
RESIDENT_OF_FEW, RESIDENT = 3, 2  # blocks a processor that run at once, of up to 16 rows of x and of more
MOST_BLOCKS = 6  # that are worth a try
BARRIER_BYTES, ALIGN_BYTES, SYSTEM_BYTES = 448, 1024, 1024
WARPGROUPS = {1: (8, 16, 32, 64, 128), 2: (8, 16, 32, 64, 128), 4: (32, 64)}  # tile_tokens compiled for each
# The same of mma.sync. A WGMMA takes 32 clocks for its operand in registers, however few rows x has: at a few
# rows that is more than memory takes.
BY_WARPS = {1: (8, 16, 32), 2: (8, 16, 32), 4: ()}
# What a configuration's clusters say here, a sum: products by mma.sync; the kernel compiled for groups of 128
# columns without zero points, of half the instructions; first weights loaded at a pace, for the sake of
# attention ahead. With either of the last two results are the same to the bit.
MMA, PLAIN, PACED = 1, 2, 4
PLAIN_GROUP, PLAIN_TOKENS = 128, {0: (32, 64, 128), MMA: (8, 16, 32)}


def weights_name(group: int, k: int, bits: int = 4) -> str:
    """How sites name weights with one scale for so many of k columns."""
    return f"{PREFIXES[bits]}{'all' if group < 0 or group >= k else group}"


def bits_of(weights: str) -> int | None:
    """Bits of one of the weights that sites name so; None of other weights."""
    return next((bits for bits, prefix in PREFIXES.items() if weights.startswith(prefix)), None)


def group_of(site: Site) -> int | None:
    """Columns with one scale, -1 for all of them; None for a site of other weights."""
    if bits_of(site.weights) is None:
        return None
    size = site.weights.partition("/")[2]
    return -1 if size == "all" else int(size)


def site_of(
    kind: Kind, num_tokens: int, n: int, k: int, dtype: torch.dtype, group: int, bits: int = 4
) -> Site:
    """The site of a GEMM whose weights have a scale for so many columns; num_tokens is one of BUCKETS."""
    kept = weights_name(group, k, bits)
    return Site(kind=kind, num_tokens=num_tokens, n=n, k=k, dtype=name_of(dtype), weights=kept)


def group_shift(group: int, k: int) -> int | None:
    """How the kernel counts columns with one scale, 32 << shift; None where it cannot."""
    if group < 0 or group >= k:
        return WHOLE_ROW_SHIFT
    return GROUPS.index(group) if group in GROUPS else None


@cached_until_adopted
def config_of(
    kind: Kind,
    num_tokens: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    group: int,
    device: torch.device,
    bits: int = 4,
) -> GemmConfig | None:
    """The configuration for so many rows; None where weights are written out for the library's GEMM.

    Where a kernel for plain groups is compiled it is taken, whichever was measured: it does less for the
    same bits.
    """
    bucket = bucket_of(num_tokens)
    if bucket is None:
        return None
    choice = choose(site_of(kind, bucket, n, k, dtype, group, bits), device_name_of(device, dtype))
    assert not isinstance(choice.kernel, Method), "a method of CPUs"
    config = choice.kernel
    if not choice.is_measured:
        config = default_config(kind, bucket, n, k, group, processors_of(device), bits)
    return plain(config) if config is not None and is_plain(group, bits) else config


def is_plain(group: int, bits: int) -> bool:
    """Whether there are kernels for such groups alone; they take weights without zero points."""
    return (group, bits) == (PLAIN_GROUP, 4)


def default_config(
    kind: Kind, bucket: int, n: int, k: int, group: int, num_processors: int, bits: int = 4
) -> GemmConfig:
    """Few warpgroups a block, columns divided as long as all blocks run at once, and all memory for stages.

    On an H200 it is within a tenth of the fastest for the projections of an 8B model.
    """
    tokens, warpgroups = min(max(8, bucket), MOST_TOKENS), 2 if kind == "gated" else 1
    blocks = ceil_div(n, warpgroups * TILE) * ceil_div(bucket, tokens)
    most = (RESIDENT_OF_FEW if tokens <= 16 else RESIDENT) * num_processors
    fitting = [split for split in (1, 2, 4, 8) if blocks * split <= most]
    split_k = max((split for split in fitting if num_steps(tokens, k, split, bits) >= 2), default=1)
    for room in (min(RESIDENT_OF_FEW, ceil_div(blocks * split_k, num_processors)), 1):
        stages = most_stages(warpgroups, tokens, k, group, split_k, MAX_SHARED // room, bits=bits)
        if stages is not None:
            return GemmConfig(warpgroups, tokens, 1, split_k, stages)
    raise AssertionError("two stages of the smallest tile fit into no memory")


def tiles_of(tokens: int, bits: int = 4) -> int:
    """Tiles of 64 columns a stage."""
    return 4 if tokens <= 16 and bits == 4 else 2


def num_steps(tokens: int, k: int, split_k: int, bits: int = 4) -> int:
    """Stages that a block goes through."""
    return ceil_div(ceil_div(k, TILE * tiles_of(tokens, bits)), split_k)


def shared_bytes(
    warpgroups: int, tokens: int, group: int, stages: int, *, zero: bool = True, bits: int = 4
) -> int:
    """What a block takes of shared memory; csrc/linear_w4a16/shape.cuh counts the same."""
    tiles = tiles_of(tokens, bits)
    groups = 1 if group < 0 else max(1, TILE * tiles // group)
    scales = warpgroups * groups * TILE * 2 * (2 if zero else 1)
    stage = tiles * (warpgroups * TILE * TILE * bits // 8 + tokens * TILE * 2) + scales
    sums = (warpgroups * TILE + 4) * tokens * 4
    sent = warpgroups * TILE * tokens * 4 if tokens <= 32 else 0
    return max(stages * stage, sums) + sent + BARRIER_BYTES + ALIGN_BYTES


def most_stages(
    warpgroups: int,
    tokens: int,
    k: int,
    group: int,
    split_k: int,
    limit: int,
    *,
    zero: bool = True,
    bits: int = 4,
) -> int | None:
    """Stages that are of use and fit into so many bytes of shared memory; None where two do not."""
    free = limit - SYSTEM_BYTES
    for count in range(min(MAX_STAGES, max(2, num_steps(tokens, k, split_k, bits))), 1, -1):
        if shared_bytes(warpgroups, tokens, group, count, zero=zero, bits=bits) <= free:
            return count
    return None


def candidates(site: Site, group: int, num_processors: int) -> tuple[GemmConfig, ...]:
    """The configurations worth measuring on so many multiprocessors, by WGMMA and by mma.sync."""
    found = tuple(dict.fromkeys(_candidates(site, group, num_processors)))
    few = [config for config in found if config.tile_tokens in BY_WARPS[config.warpgroups]]
    both = (*found, *(config._replace(clusters=MMA) for config in few))
    return tuple(map(plain, both)) if is_plain(group, bits_of(site.weights) or 4) else both


def plain(config: GemmConfig) -> GemmConfig:
    """The configuration for groups of 128 columns without zero points."""
    is_compiled = config.tile_tokens in PLAIN_TOKENS[config.clusters & MMA]
    return config._replace(clusters=config.clusters | PLAIN) if is_compiled else config


def general(config: GemmConfig) -> GemmConfig:
    """The same for any groups, whose results have the same bits."""
    return config._replace(clusters=config.clusters & ~PLAIN)


def _candidates(site: Site, group: int, num_processors: int) -> Iterator[GemmConfig]:
    wanted, bits = min(max(8, site.num_tokens), MOST_TOKENS), bits_of(site.weights) or 4
    for warpgroups, split_k in itertools.product((1, 2, 4), (1, 2, 4, 8)):
        width = site.n // 2 if site.kind == "gated" else site.n
        rows = warpgroups * TILE // 2 if site.kind == "gated" else warpgroups * TILE
        blocks = ceil_div(width, rows) * ceil_div(site.num_tokens, wanted) * split_k
        if wanted not in WARPGROUPS[warpgroups] or (site.kind == "gated" and warpgroups == 1):
            continue
        many = split_k > 1 and blocks > MOST_BLOCKS * num_processors
        if many or (split_k < MAX_CLUSTER and 2 * blocks < num_processors):
            continue
        for share, multicast in itertools.product((1, 2, 3, 4), (1, 2) if wanted >= 32 else (1,)):
            stages = most_stages(warpgroups, wanted, site.k, group, split_k, MAX_SHARED // share, bits=bits)
            if stages is not None and multicast * split_k <= MAX_CLUSTER:
                yield GemmConfig(warpgroups, wanted, multicast, split_k, stages)
