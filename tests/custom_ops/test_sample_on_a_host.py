"""The CUDA kernel of sample as C++: draws that show where the filters end, and what chunks weigh."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lamina.custom_ops.sample import reference

from . import host_kernels
from .guarded import at_the_end

pytestmark = pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")

NUM_SEEDS = 1 << 15


class Filters(NamedTuple):
    """Of one row."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def odds(self, logits: Tensor) -> Tensor:
        """What the formula keeps of a row, filled up to whole chunks."""
        gaps = reference.gaps_below(
            logits.amax(-1, True), reference.chunked(logits[None]).flatten(1), torch.ones(1)
        )
        return reference.kept_odds(gaps, *(torch.tensor([x]) for x in self))


def races(odds: Tensor) -> Tensor:
    """The scores of chunks [at most NUM_SEEDS, chunks]: the largest wins."""
    masses = odds.view(-1, reference.CHUNK).sum(-1)[None]
    seeds = torch.arange(min(NUM_SEEDS, 2**22 // masses.numel()))
    keys = reference.row_keys(seeds, torch.zeros(1, dtype=torch.int64))
    return masses / reference.exponential_noise(keys, reference.chunk_counters(masses))


def seeds_that_draw(token: int, odds: Tensor) -> list[int]:
    """One of the seeds for which the formula draws this token, if there is one."""
    chunk = torch.tensor([token // reference.CHUNK])
    seeds = (races(odds).argmax(-1) == chunk).nonzero().flatten()
    ids = reference.token_ids(chunk)
    keys = reference.row_keys(seeds, torch.zeros(1, dtype=torch.int64))
    drawn = reference.first_to_finish(odds.gather(1, ids.long()), keys, ids) + chunk * reference.CHUNK
    return seeds[drawn == token][:1].tolist()


def drawn(
    on_host: Any, rows: Tensor, seeds: list[int], filters: Filters, banned: Tensor | None = None
) -> list[int]:
    """The kernel's tokens of rows at the end of memory."""
    count = len(seeds)
    settings = [torch.ones(count), *(torch.tensor([x] * count) for x in filters)]
    settings[1] = settings[1].int()
    none = torch.empty(count, 0, dtype=torch.int32) if banned is None else at_the_end(banned)
    out, longs = torch.full((count,), -77, dtype=torch.int32), torch.tensor(seeds)
    on_host("sample")(at_the_end(rows), *settings, longs, longs * 0, none, rows.shape[1], out)
    tokens: list[int] = out.tolist()
    return tokens


def grid() -> Tensor:
    """A token a step of the first bins, or two steps, so that sums end where lines and warps of bins do."""
    return -torch.arange(3000) / 1024


def two_levels(few: float) -> Tensor:
    logits = torch.zeros(3000)
    logits[17::100] = few
    return logits


def overflowing() -> Tensor:
    """So many odds just below 1 in the same bin that, each rounded up, they would make 2 ** 32."""
    logits = torch.full((16384,), -100.0)
    logits[:8192], logits[5000], logits[7000] = -(2.0**-21), 0.0, -(2.0**-20)
    return logits


def hardly_uneven() -> Tensor:
    logits = torch.ones(3000)
    logits[::300] -= 2.0**-24
    return logits


def second_chunk_first() -> Tensor:
    logits = -3 - torch.arange(600) / 600
    logits[300], logits[0] = 0.0, -0.1
    return logits


def one_above_many() -> Tensor:
    """More equal ones than are listed, of which the first has the first id."""
    logits = torch.full((3000,), -0.5)
    logits[300] = 0.0
    return logits


def wide() -> Tensor:
    """More chunks than a block has threads, and of four of them a token that counts."""
    logits = torch.full((256 * 1024 + 300,), -100.0)
    for place, chunk in enumerate((0, 100, 1000, 1024)):
        logits[chunk * 256 + place] = -place / 10
    return logits


def end_of_a_bin() -> Tensor:
    """The last id where one of the first bins, 2 ** -12 wide, ends; alone in its chunk."""
    logits = torch.zeros(512)
    logits[256:] = -100.0
    logits[511] = -(2 * (4097 * 1024 - 1) - 1) * 2.0**-23
    return logits


ROWS = {
    "grid": grid(),
    "flat": torch.zeros(3000),
    "far": two_levels(-2.0),
    "very far": two_levels(-8.0),
    "nearly flat": 1 - torch.arange(3000) * 7 % 16 * 2.0**-24,
    "hardly uneven": hardly_uneven(),
    "overflowing": overflowing(),
    "second chunk first": second_chunk_first(),
    "one above many": one_above_many(),
    "wide": wide(),
    "end of a bin": end_of_a_bin(),
    "one chunk": torch.zeros(256),
    "two chunks": torch.randn(300, generator=torch.Generator().manual_seed(0)),
}
JUST = (1 + 2**-20) / 256  # what is just enough for one of 256, and what is not
EDGES = [
    *(("grid", Filters(top_k)) for top_k in (80, 512, 1000, 2999)),
    ("grid", Filters(top_p=0.6)),
    ("grid", Filters(1000, 0.5)),
    ("grid", Filters(min_p=0.5)),
    *(("flat", Filters(top_k)) for top_k in (100, 1000, 2900)),
    *(("flat", Filters(top_p=top_p)) for top_p in (0.1, 0.9)),
    *(("far", filters) for filters in (Filters(2980), Filters(top_p=0.9995), Filters(2990, 0.9995))),
    ("very far", Filters(top_p=0.99)),
    *(("nearly flat", filters) for filters in (Filters(1500), Filters(top_p=0.6))),
    ("hardly uneven", Filters(2995)),
    *(("flat", Filters(2999, top_p)) for top_p in (0.9999, 0.9)),
    *(("overflowing", filters) for filters in (Filters(8191), Filters(8192), Filters(top_p=0.5))),
    ("second chunk first", Filters(2)),
    ("one above many", Filters(2)),
    ("wide", Filters(top_p=0.7)),
    ("end of a bin", Filters(257)),
    *(("one chunk", Filters(top_p=top_p)) for top_p in (JUST, JUST + 2**-31)),
    *(
        ("two chunks", filters)
        for filters in (Filters(7), Filters(299), Filters(top_p=0.7), Filters(40, 0.9, 0.1))
    ),
]


@pytest.mark.parametrize("name, filters", EDGES, ids=str)
def test_the_last_token_within_a_bound_is_drawn_and_the_first_beyond_it_is_not(
    on_host: Any, name: str, filters: Filters
) -> None:
    logits = ROWS[name]
    odds = filters.odds(logits)
    order = reference.chunked(logits[None]).flatten().neg().sort(stable=True).indices
    num_kept = int((odds > 0).sum())
    last = int(order[num_kept - 1])
    inside = seeds_that_draw(last, odds)
    assert inside
    seeds, right = inside, [last]
    if num_kept < len(logits):
        beyond, wider = int(order[num_kept]), odds.clone()
        wider[0, beyond] = Filters().odds(logits)[0, beyond]
        for seed in seeds_that_draw(beyond, wider):
            keys = reference.row_keys(torch.tensor([seed]), torch.zeros(1, dtype=torch.int64))
            seeds, right = [*seeds, seed], [*right, int(reference.draw(odds, keys))]
            assert right[-1] != beyond
    assert drawn(on_host, logits.expand(len(seeds), -1), seeds, filters) == right


@pytest.mark.parametrize("filters", [Filters(1000), Filters(top_p=0.6), Filters(2000, 0.7, 0.3)], ids=str)
@pytest.mark.parametrize("name", ["grid", "shuffled"])
def test_chunks_weigh_what_of_them_is_kept(on_host: Any, name: str, filters: Filters) -> None:
    """Each wins by little and loses by little: a mass that is a twentieth wrong changes a draw."""
    logits = grid()
    if name == "shuffled":
        logits = logits[torch.randperm(3000, generator=torch.Generator().manual_seed(1))]
    odds = filters.odds(logits)
    best, chunks = races(odds).topk(2, dim=-1)
    lead = best[:, 0] / best[:, 1]
    seeds = []
    for place in (0, 1):
        for chunk in chunks.unique().tolist():
            close = ((chunks[:, place] == chunk) & (lead > 1.0001)).nonzero().flatten()
            seeds.append(int(close[lead[close].argmin()]))
    keys = reference.row_keys(torch.tensor(seeds), torch.zeros(1, dtype=torch.int64))
    right = reference.draw(odds.expand(len(seeds), -1), keys).tolist()
    assert drawn(on_host, logits.expand(len(seeds), -1), seeds, filters) == right


LUCKY = 6921638  # a seed for which id 23 has the least noise that there is, 2 ** -32, and id 0 has 1.1
UNLIKELY = [
    (Filters(), 23),
    (Filters(2), 23),
    (Filters(min_p=1e-10), 23),
    (Filters(top_p=1 - 2**-24), 0),
    (Filters(min_p=1e-8), 0),
]


@pytest.mark.parametrize("filters, token", UNLIKELY, ids=str)
def test_filters_that_are_off_leave_the_least_likely_token(
    on_host: Any, filters: Filters, token: int
) -> None:
    """Its odds, of 3e-10, win against 1 with the least noise, and would not with twice that."""
    logits = torch.full((1, 256), -torch.inf)
    logits[0, 0], logits[0, 23] = 0.0, -21.9266
    assert drawn(on_host, logits, [LUCKY], filters) == [token]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans_hold_in_every_chunk_for_every_id(on_host: Any, temperature: float) -> None:
    """More of them than a warp has lanes, and a row's beside the next one's."""
    vocab, rows = 1100, 3
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(3))
    ranks = torch.empty(vocab).scatter_(0, order, torch.arange(float(vocab)))
    logits = -ranks.expand(rows, -1)
    for num_banned in (1, 32, 40, 200):
        banned = torch.full((rows, num_banned), -1, dtype=torch.int32)
        banned[0], banned[1, 0] = order[:num_banned], order[num_banned]
        out, none = torch.empty(rows, dtype=torch.int32), torch.zeros(rows)
        longs = torch.arange(rows)
        on_host_sample = on_host("sample")
        on_host_sample(
            *(at_the_end(logits), none + temperature, longs.int() * 0, none + 1, none, longs, longs),
            *(at_the_end(banned), vocab, out),
        )
        wanted = torch.full((rows,), -7, dtype=torch.int32)
        reference.sample(
            *(logits, none + temperature, longs.int() * 0, none + 1, none, longs, longs),
            *(banned, vocab, wanted),
        )
        assert torch.equal(out, wanted)
        if temperature == 0:
            assert out.tolist() == [order[num_banned], order[0], order[0]]


def test_id_0_can_be_banned_alone(on_host: Any) -> None:
    logits = -torch.arange(300.0)[None]
    for others in ([], [-1] * 39):
        banned = torch.tensor([[0, *others]], dtype=torch.int32)
        assert drawn(on_host, logits, [5], Filters(1), banned) == [1]


@pytest.mark.parametrize("others", [0, 3])
def test_rows_beyond_the_last_take_no_part_in_their_order(on_host: Any, others: int) -> None:
    """As many rows as are put in order, in front of one that would come first."""
    count = 100 + others
    rows, more = torch.arange(count), torch.ones(count + 1)
    logits = torch.randn(count, 40, generator=torch.Generator().manual_seed(5))
    is_drawn = (torch.arange(count + 1) >= count - 2).float()
    settings = is_drawn, (more * 0).int(), more * 0.9, more * 0
    outs = [torch.full((count,), -77, dtype=torch.int32) for _ in range(2)]
    none = torch.empty(count, 0, dtype=torch.int32)
    for call, out in zip((on_host("sample"), reference.sample), outs, strict=True):
        call(logits, *(column[:count] for column in settings), rows, rows, none, 40, out)
    assert torch.equal(*outs)


@pytest.mark.parametrize("shares", [(3, 1), (5, 2), (7, 3), (20, 19), (9, 7), (13, 11)], ids=str)
def test_a_share_of_the_largest_that_is_met_exactly_is_enough(on_host: Any, shares: tuple[int, int]) -> None:
    logits = torch.tensor(shares, dtype=torch.float64).log().float()
    seeds = seeds_that_draw(1, Filters().odds(logits))
    assert drawn(on_host, logits[None], seeds, Filters(min_p=shares[1] / shares[0])) == [1]
