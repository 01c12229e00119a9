"""The Triton kernels of lamina::sample: the CUDA kernels' method, an interval cut into eight by compares."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference
from .row_indices import with_row_indices
from .workspace import workspace

CHUNK_TOKENS = reference.CHUNK
CHUNK = tl.constexpr(CHUNK_TOKENS)
BROKEN = tl.constexpr(reference.BROKEN)
REACH = tl.constexpr(reference.REACH)
TILE = tl.constexpr(8)  # chunks read together
PARTS = tl.constexpr(8)  # of an interval of ranks
ID_BITS = tl.constexpr(20)  # a rank is a gap's bits, then an id
LAST_ID = tl.constexpr((1 << 20) - 1)
LARGEST = tl.constexpr(3.4028234663852886e38)
ROOM = tl.constexpr(1.0005)  # for what rounding may add to a sum of 2**20 weights


@triton.jit
def larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def allowed_logits(logits, banned, num_banned, num_ids, ids):
    """A row's logits at ids of any shape, -inf at those that are not to be chosen."""
    values = tl.load(logits + ids, mask=ids < num_ids, other=float("-inf")).to(tl.float32)
    for i in range(num_banned):
        is_banned = (ids == tl.load(banned + i)) & (values < float("inf"))  # NaN and infinity stay
        values = tl.where(is_banned, float("-inf"), values)
    return values


@triton.jit
def sharpness_of(temperature):
    """1 / temperature, finite so that a gap of 0 stays 0."""
    return tl.minimum(tl.div_rn(1.0, temperature), LARGEST)


@triton.jit
def scan_chunks(
    logits,
    row_stride,
    temperature,
    banned,
    num_banned,
    largest,  # [n, num_chunks]: the largest logit of each chunk
    sums,  # [n, num_chunks]: its tokens' summed odds relative to it
    num_ids,
    num_chunks,
):
    row = tl.program_id(1).to(tl.int64)
    chunks = tl.program_id(0) * TILE + tl.arange(0, TILE)
    ids = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    values = allowed_logits(logits + row * row_stride, banned + row * num_banned, num_banned, num_ids, ids)
    peaks = tl.reduce(values, 1, larger_or_nan)
    kept = chunks < num_chunks
    tl.store(largest + row * num_chunks + chunks, peaks, mask=kept)
    heat = tl.load(temperature + row)
    if heat > 0:
        gaps = (tl.maximum(peaks, -LARGEST)[:, None] - values) * sharpness_of(heat)
        tl.store(sums + row * num_chunks + chunks, tl.sum(tl.exp(-gaps), 1), mask=kept)


@triton.jit
def entries(scores, indices):
    """Numbers that grow with the score and, among equals, with a lower index; NaN is largest."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0 equals 0
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = tl.where(scores != scores, 0x7FFFFFFF, keys)
    return keys.to(tl.int64) * 4294967296 + (0x7FFFFFFF - indices)


@triton.jit
def index_of(winner):
    return (0x7FFFFFFF - (winner & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def mix(words):
    words = (words ^ (words >> 30)) * 0xBF58476D1CE4E5B9
    words = (words ^ (words >> 27)) * 0x94D049BB133111EB
    return words ^ (words >> 31)


@triton.jit
def row_key(seed, position):
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    return mix(mix(seed.to(tl.uint64) + golden) + position.to(tl.uint64) * golden)


@triton.jit
def exponential_noise(key, counters):
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    bits = (counters.to(tl.uint32, bitcast=True) * 0x9E3779B9) ^ low
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B + high
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    signed = bits.to(tl.int32, bitcast=True)
    bits = (signed ^ (signed >> 15)) & 0x7FFFFFFF
    return (-tl.log((bits.to(tl.float64) + 0.5) * 4.656612873077393e-10)).to(tl.float32)  # 2**-31


@triton.jit
def ranks_of(gaps, ids):
    return (gaps.to(tl.int32, bitcast=True).to(tl.int64) << ID_BITS) + ids


@triton.jit
def last_rank(gap):
    return ranks_of(gap, LAST_ID)


@triton.jit
def weights_of(gaps, scale):
    """What tokens count for: their odds as integers, or 1 where scale is 0."""
    return tl.where(scale == 0, 1.0, tl.exp(-gaps) * scale + 0.5).to(tl.int64)


@triton.jit
def scale_of(total):
    """A power of two, so that equals of the likeliest count for what they weigh; sums stay below 2**32."""
    exponent = ((total * ROOM).to(tl.int32, bitcast=True) >> 23) - 126
    return ((127 + 32 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def part_ends(low, high):
    step = (high - low) // PARTS + 1
    return low + step * (tl.arange(0, PARTS).to(tl.int64) + 1) - 1, step


@triton.jit
def take_part(low, high, goal, step, sums):
    """The part in which the running sum reaches the goal, and what of the goal is left in it."""
    is_short = sums < goal
    num_short = tl.sum(is_short.to(tl.int64), 0)
    before = tl.max(tl.where(is_short, sums, 0), 0)
    low += num_short * step
    return low, tl.minimum(low + step - 1, high), goal - before


@triton.jit
def bound_by_largest(gaps, ends, high, goal, scale):
    """A rank up to which the chunks' largest tokens alone reach the goal; high if they do not."""
    ranks, weights = ranks_of(gaps, ends), weights_of(gaps, scale)
    low = tl.zeros([], tl.int64)
    if tl.sum(tl.where(ranks <= high, weights, 0), 0) >= goal:
        for _ in range(6):  # an 8th of an 8th: closer than the largest are to each other
            parts, step = part_ends(low, high)
            inside = (ranks >= low)[None, :] & (ranks[None, :] <= parts[:, None])
            sums = tl.sum(tl.where(inside, weights[None, :], 0), 1)
            low, high, goal = take_part(low, high, goal, step, sums)
    return high


@triton.jit
def list_live(live, gaps, ends, num_chunks, high):
    """Writes which chunks may hold ranks up to high; returns how many they are."""
    is_live = (ends < num_chunks * CHUNK) & (ranks_of(gaps, 0) <= high)
    row_indices = tl.cumsum(is_live.to(tl.int32), 0) - 1
    tl.debug_barrier()
    tl.store(live + row_indices, ends // CHUNK, mask=is_live)
    tl.debug_barrier()
    return tl.sum(is_live.to(tl.int32), 0)


@triton.jit
def live_gaps(logits, banned, num_banned, num_ids, live, first, num_live, peak, sharpness):
    """Gaps and ids of a tile of live chunks; beyond the last they are infinite, and the chunk is -1."""
    row_indices = first + tl.arange(0, TILE)
    chunks = tl.load(live + row_indices, mask=row_indices < num_live, other=-1)
    ids = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = tl.where(ids < 0, num_ids, ids)
    values = allowed_logits(logits, banned, num_banned, num_ids, inside)
    return (peak - values) * sharpness, ids, chunks


@triton.jit
def select(logits, banned, num_banned, num_ids, live, num_live, peak, sharpness, high, goal, scale):
    """The first rank up to which the weights of all tokens reach the goal, or high if none does."""
    low = tl.zeros([], tl.int64)
    while low < high:
        ends, step = part_ends(low, high)
        sums = tl.zeros([PARTS], tl.int64)
        for first in range(0, num_live, TILE):
            gaps, ids, _ = live_gaps(
                logits, banned, num_banned, num_ids, live, first, num_live, peak, sharpness
            )
            ranks = tl.reshape(ranks_of(gaps, ids), [TILE * CHUNK])
            weights = tl.reshape(weights_of(gaps, scale), [TILE * CHUNK])
            inside = (ranks >= low)[None, :] & (ranks[None, :] <= ends[:, None])
            sums += tl.sum(tl.where(inside, weights[None, :], 0), 1)
        if tl.max(sums, 0) < goal:
            low = high
        else:
            low, high, goal = take_part(low, high, goal, step, sums)
    return high


@triton.jit
def sum_kept(logits, banned, num_banned, num_ids, live, num_live, peak, sharpness, masses, last):
    """Writes the summed odds of each live chunk's tokens up to the last rank."""
    for first in range(0, num_live, TILE):
        gaps, ids, chunks = live_gaps(
            logits, banned, num_banned, num_ids, live, first, num_live, peak, sharpness
        )
        odds = tl.where(ranks_of(gaps, ids) <= last, tl.exp(-gaps), 0.0)
        tl.store(masses + chunks, tl.sum(odds, 1), mask=chunks >= 0)


@triton.jit
def keep(
    logits,
    banned,
    num_banned,
    num_ids,
    live,
    masses,
    peak,
    sharpness,
    gaps,  # of the chunks' largest tokens
    chunks,
    num_chunks,
    top_k,
    top_p,
    min_p,
):
    """Applies the filters to the masses, which hold every token's odds; returns the last rank to keep."""
    everything = last_rank(tl.full([], float("inf"), tl.float32))
    last = everything
    ends = chunks * CHUNK + CHUNK - 1
    if (top_k > 0) & (top_k < num_ids):
        goal = top_k.to(tl.int64)
        high = bound_by_largest(gaps, ends, last, goal, 0.0)
        num_live = list_live(live, gaps, ends, num_chunks, high)
        last = select(logits, banned, num_banned, num_ids, live, num_live, peak, sharpness, high, goal, 0.0)
    if top_p < 1:
        total = tl.sum(tl.load(masses + chunks, mask=chunks < num_chunks, other=0.0), 0)
        if last < everything:
            tl.store(masses + chunks, tl.zeros_like(gaps), mask=chunks < num_chunks)
            num_live = list_live(live, gaps, ends, num_chunks, last)
            sum_kept(logits, banned, num_banned, num_ids, live, num_live, peak, sharpness, masses, last)
            tl.debug_barrier()
            total = tl.sum(tl.load(masses + chunks, mask=chunks < num_chunks, other=0.0), 0)
        scale = scale_of(total)
        share = top_p.to(tl.float64) * REACH * total.to(tl.float64) * scale.to(tl.float64)
        goal = tl.maximum(tl.ceil(share).to(tl.int64), 1)
        high = bound_by_largest(gaps, ends, last, goal, scale)
        num_live = list_live(live, gaps, ends, num_chunks, high)
        last = select(logits, banned, num_banned, num_ids, live, num_live, peak, sharpness, high, goal, scale)
    if min_p > 0:
        limit = tl.maximum((-tl.log(min_p.to(tl.float64) * REACH)).to(tl.float32), 0.0)
        last = tl.minimum(last, last_rank(limit))
    if last < everything:
        tl.store(masses + chunks, tl.zeros_like(gaps), mask=chunks < num_chunks)
        num_live = list_live(live, gaps, ends, num_chunks, last)
        sum_kept(logits, banned, num_banned, num_ids, live, num_live, peak, sharpness, masses, last)
        tl.debug_barrier()
    return last


@triton.jit
def choose_tokens(
    logits,
    row_stride,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    banned,
    num_banned,
    largest,
    sums,
    live,
    out,
    num_ids,
    num_chunks,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    banned += row * num_banned
    masses = sums + row * num_chunks
    live += row * num_chunks
    chunks = tl.arange(0, CHUNKS)
    known = chunks < num_chunks
    peaks = tl.load(largest + row * num_chunks + chunks, mask=known, other=float("-inf"))
    chunk = index_of(tl.max(entries(peaks, chunks), 0))
    peak = tl.load(largest + row * num_chunks + chunk) + 0.0  # not -0, so that no gap is
    heat = tl.load(temperature + row)
    sharpness = sharpness_of(heat)
    key = row_key(tl.load(seeds + row), tl.load(positions + row))
    within = tl.arange(0, CHUNK)
    is_drawn = (heat > 0) & (tl.abs(peak) < float("inf"))
    if is_drawn:
        gaps = (peak - peaks) * sharpness
        odds = tl.load(masses + chunks, mask=known, other=0.0) * tl.exp(-gaps)
        tl.store(masses + chunks, odds, mask=known)
        tl.debug_barrier()
        last = keep(
            *(logits, banned, num_banned, num_ids, live, masses, peak, sharpness, gaps, chunks, num_chunks),
            *(tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)),
        )
        odds = tl.load(masses + chunks, mask=known, other=0.0)
        scores = tl.div_rn(odds, exponential_noise(key, -1 - chunks))
        chunk = index_of(tl.max(tl.where(known, entries(scores, chunks), -1), 0))
        ids = chunk * CHUNK + within
        gap = (peak - allowed_logits(logits, banned, num_banned, num_ids, ids)) * sharpness
        odds = tl.where(ranks_of(gap, ids) <= last, tl.exp(-gap), 0.0)
        token = index_of(tl.max(entries(tl.div_rn(odds, exponential_noise(key, ids)), ids), 0))
    else:
        ids = chunk * CHUNK + within
        values = allowed_logits(logits, banned, num_banned, num_ids, ids)
        token = index_of(tl.max(entries(values, ids), 0))
    tl.store(out + row, tl.where(tl.abs(peak) < float("inf"), token, BROKEN))


@with_row_indices
def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    banned: Tensor,
    num_valid_ids: int,
    out: Tensor,
) -> None:
    """The token of each row, in their order."""
    num_rows = len(logits)
    num_chunks = triton.cdiv(num_valid_ids, CHUNK_TOKENS)
    if num_rows == 0:
        return
    size = num_rows * num_chunks
    largest, sums, live = workspace(logits.device, 3 * size)[: 3 * size].view(3, size)
    with torch.cuda.device_of(logits):
        scan_chunks[(triton.cdiv(num_chunks, TILE.value), num_rows)](
            *(logits, logits.stride(0), temperature, banned, banned.shape[1]),
            *(largest, sums, num_valid_ids, num_chunks),
        )
        choose_tokens[(num_rows,)](
            *(logits, logits.stride(0), temperature, top_k, top_p, min_p, seeds, positions),
            *(banned, banned.shape[1], largest, sums, live.view(torch.int32), out),
            *(num_valid_ids, num_chunks),
            CHUNKS=triton.next_power_of_2(num_chunks),
            num_warps=8,
        )
