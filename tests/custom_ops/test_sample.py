"""lamina::sample: one formula by every provider, its schema, and arguments that do not fit."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import ShapeError
from lamina.custom_ops import sample
from lamina.custom_ops._shared.registry import select
from lamina.custom_ops.sample import reference
from lamina.custom_ops.sample.reference import BROKEN

DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seeds": torch.int64,
    "positions": torch.int64,
}


def arguments(
    logits: Tensor, settings: list[tuple[Any, ...]], num_banned: int = 0, **change: Any
) -> dict[str, Any]:
    """The op's arguments: settings are (temperature, top_k, top_p, min_p, seed, position) of each row."""
    columns = dict(zip(DTYPES, zip(*settings, strict=True), strict=True))
    tensors = {name: torch.tensor(columns[name], dtype=dtype) for name, dtype in DTYPES.items()}
    num_rows, vocab = logits.shape
    banned = (
        torch.arange(num_rows * num_banned, dtype=torch.int32).view(num_rows, num_banned) % (vocab + 2) - 1
    )
    out = torch.full((num_rows,), -77, dtype=torch.int32)
    return {"logits": logits, **tensors, "banned": banned, "num_valid_ids": vocab, "out": out} | change


def run(provider: str, logits: Tensor, **others: Any) -> list[int]:
    call = select("sample", device=torch.device("cpu"), dtype=logits.dtype, provider=provider).call
    call(logits, *others.values())
    chosen: list[int] = others["out"].tolist()
    return chosen


row_settings = st.tuples(
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    st.sampled_from([0, 0, 1, 5, 100, 10_000]),
    st.sampled_from([1.0, 1.0, 0.3, 0.9, 0.9999]),
    st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 100_000),
)


@given(
    settings=st.lists(row_settings, min_size=1, max_size=9),
    vocab=st.sampled_from([1, 5, 256, 777, 9000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    scale=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
    num_banned=st.sampled_from([0, 0, 3]),
    seed=st.integers(0, 1000),
)
def test_every_provider_chooses_the_formulas_tokens(
    settings: list[tuple[Any, ...]], vocab: int, dtype: torch.dtype, scale: float, num_banned: int, seed: int
) -> None:
    logits = torch.randn(len(settings), vocab, generator=torch.Generator().manual_seed(seed)) * scale
    given_ = arguments(logits.to(dtype), settings, num_banned)
    expected = run("reference", **given_)
    for provider in ("numpy", *(["cpu"] if dtype != torch.float64 else [])):
        assert run(provider, **given_ | {"out": given_["out"].clone()}) == expected, provider


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "filters", [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.2), (5, 0.5, 0.1)], ids=str
)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-38, 1e-45])
def test_rows_of_broken_logits_get_no_token_and_disturb_no_other(
    broken: float, filters: tuple[Any, ...], temperature: float
) -> None:
    logits = torch.randn(5, 600, generator=torch.Generator().manual_seed(0))
    logits[0, [500, 20, 21]] = broken
    logits[1] = broken
    logits[2, 3:] = broken
    logits[3, 599] = broken
    given_ = arguments(logits, [(temperature, *filters, row, row) for row in range(5)])
    chosen = run("reference", **given_)
    for provider in ("numpy", "cpu"):
        assert run(provider, **given_ | {"out": given_["out"].clone()}) == chosen, provider
    is_wrong = broken != -torch.inf  # a mask, unless all are
    assert [token == BROKEN for token in chosen] == [is_wrong, True, is_wrong, is_wrong, False]


@pytest.mark.parametrize("provider", ["numpy", "cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_ban_hides_no_broken_logit(provider: str, dtype: torch.dtype, temperature: float) -> None:
    logits = torch.randn(5, 600, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, 7], logits[1, 7], logits[2, 7] = torch.nan, torch.inf, -torch.inf
    logits[3] = -torch.inf
    logits[3, 7] = 1.0  # of all that may be chosen, none is above -inf
    banned = torch.full((5, 2), 7, dtype=torch.int32)
    settings = [(temperature, 0, 1.0, 0.0, row, row) for row in range(5)]
    chosen = run(provider, **arguments(logits, settings, banned=banned))
    assert [token == BROKEN for token in chosen] == [True, True, False, True, False]


def kept_by(provider: str, shares: list[int], temperature: float = 1.0, **filters: Any) -> set[int]:
    """The ids that are ever drawn of a row with odds in the ratio of whole numbers."""
    draws = 300
    logits = torch.tensor(shares, dtype=torch.float64).log().mul(temperature).float().expand(draws, -1)
    row = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    settings = [(temperature, *row.values(), seed, 0) for seed in range(draws)]
    return set(run(provider, **arguments(logits.contiguous(), settings)))


EDGES = [([3, 1, 1, 5], 0.8, {0, 3}), ([4, 4, 2], 0.8, {0, 1}), ([1, 1, 1, 1, 1], 0.6, {0, 1, 2})]


@pytest.mark.parametrize("provider", ["numpy", "cpu", "reference"])
@pytest.mark.parametrize("shares, top_p, kept", EDGES, ids=str)
def test_a_share_that_is_reached_exactly_is_enough(
    provider: str, shares: list[int], top_p: float, kept: set[int]
) -> None:
    assert kept_by(provider, shares, top_p=top_p) == kept


@given(shares=st.lists(st.integers(1, 20), min_size=2, max_size=8), data=st.data())
def test_top_p_keeps_what_whole_numbers_say_at_a_bound_and_beside_it(
    shares: list[int], data: st.DataObject
) -> None:
    order = sorted(range(len(shares)), key=lambda id_: (-shares[id_], id_))
    count = data.draw(st.integers(1, len(shares) - 1))
    temperature = data.draw(st.sampled_from([0.5, 1.0, 3.0]))
    edge = sum(shares[id_] for id_ in order[:count]) / sum(shares)
    columns = [torch.tensor([x]) for x in (0, 1.0, 0.0)]
    logits = torch.tensor([shares], dtype=torch.float64).log().mul(temperature).float()
    for top_p, num_kept in ((edge, count), (edge - 1e-4, count), (edge + 1e-4, count + 1)):
        gaps = reference.gaps_below(logits.amax(-1), logits, torch.tensor([temperature]))
        columns[1] = torch.tensor([top_p])
        odds = reference.kept_odds(gaps, *columns)[0]
        assert set(odds.nonzero().flatten().tolist()) == set(order[:num_kept])
        for provider in ("cpu", "numpy"):
            drawn = kept_by(provider, shares, temperature, top_p=top_p)
            assert drawn <= set(order[:num_kept])
            assert drawn >= {id_ for id_ in order[:num_kept] if shares[id_] * 20 > sum(shares)}


@given(shares=st.lists(st.integers(1, 20), min_size=2, max_size=6))
def test_min_p_keeps_what_is_exactly_so_likely(shares: list[int]) -> None:
    largest = max(shares)
    for least in set(shares):
        kept = {id_ for id_, share in enumerate(shares) if share >= least}
        for provider in ("cpu", "numpy", "reference"):
            drawn = kept_by(provider, shares, min_p=least / largest)
            assert drawn <= kept
            assert drawn >= {id_ for id_ in kept if shares[id_] * 20 > sum(shares)}


@pytest.mark.parametrize("provider", ["numpy", "cpu", "reference"])
def test_a_row_has_its_own_bans(provider: str) -> None:
    logits = torch.arange(40.0).expand(3, 40).contiguous()
    given_ = arguments(logits, [(0.0, 0, 1.0, 0.0, 0, 0)] * 3)
    given_["banned"] = torch.tensor([[39, 38], [-1, 39], [3, -1]], dtype=torch.int32)
    assert run(provider, **given_) == [37, 38, 39]


@pytest.mark.parametrize("provider", ["numpy", "cpu"])
def test_the_last_id_of_a_full_vocabulary_counts(provider: str) -> None:
    """Of as many ids as are looked at together, where nothing pads them, and the last the likeliest."""
    logits = (torch.arange(256) / 4).expand(24, 256).contiguous()
    settings = [
        (1.0, top_k, top_p, 0.0, seed, 0) for top_k in (0, 1, 3) for top_p in (0.15, 1.0) for seed in range(4)
    ]
    given_ = arguments(logits, settings)
    expected = run("reference", **given_)
    assert run(provider, **given_ | {"out": given_["out"].clone()}) == expected
    assert 255 in expected


@pytest.mark.parametrize("provider", ["numpy", "cpu", "reference"])
def test_rows_may_have_their_indices_among_others(provider: str) -> None:
    logits = torch.randn(3, 600, generator=torch.Generator().manual_seed(0))
    given_ = arguments(logits, [(0, 0, 1, 0, 5, 1), (1, 0, 1, 0, 5, 3), (1, 50, 0.9, 0, 6, 7)], 2)
    alone = run(provider, **given_)
    row_indices = torch.tensor([4, 1, 2])
    positions, banned = torch.full((6,), 99), torch.full((6, 2), 3, dtype=torch.int32)
    positions[row_indices], banned[row_indices] = given_["positions"], given_["banned"]
    moved = {"positions": positions, "banned": banned, "row_indices": row_indices, "chunks": None}
    out = run(provider, **given_ | {"out": torch.full((6,), -77, dtype=torch.int32)} | moved)
    assert out == [-77, alone[1], alone[2], -77, alone[0], -77]


UNLIKELY = [
    ((0, 1.0, 0.0), 23),
    ((2, 1.0, 0.0), 23),
    ((0, 1.0, 1e-10), 23),
    ((0, 1 - 2**-24, 0.0), 0),
    ((0, 1.0, 1e-8), 0),
]


@pytest.mark.parametrize("provider", ["numpy", "cpu", "reference"])
@pytest.mark.parametrize("filters, token", UNLIKELY, ids=str)
def test_filters_that_are_off_leave_the_least_likely_token(
    provider: str, filters: tuple[Any, ...], token: int
) -> None:
    """By a seed for which its noise is the least that there is, and with twice that it would not be drawn."""
    logits = torch.full((1, 256), -torch.inf)
    logits[0, 0], logits[0, 23] = 0.0, -21.9266
    assert run(provider, **arguments(logits, [(1.0, *filters, 6921638, 0)])) == [token]


@pytest.mark.parametrize("provider", ["numpy", "cpu", "reference"])
@pytest.mark.parametrize("top_k, num_kept", [(k, k) for k in range(1, 10)], ids=str)
def test_of_equal_tokens_the_lowest_ids_are_kept(provider: str, top_k: int, num_kept: int) -> None:
    """Beside tokens that are nearly as likely: gaps of which many share all but their lowest bits."""
    logits = torch.tensor([0.0, -1.002, -1.001, -1.002, -1.0, -1.002, -1.001, -1.002, -1.002])
    order = logits.neg().sort(stable=True).indices.tolist()
    given_ = arguments(
        logits.expand(200, -1).contiguous(), [(1.0, top_k, 1.0, 0.0, s, 0) for s in range(200)]
    )
    assert set(run(provider, **given_)) == set(order[:num_kept])
    largest_share = given_ | {"top_p": torch.full((200,), 0.9999)}
    assert set(run(provider, **largest_share)) == set(order[:num_kept])
    half = given_ | {"top_p": torch.full((200,), 0.5)}
    odds = reference.kept_odds(-logits[None], *(torch.tensor([x]) for x in (top_k, 0.5, 0.0)))
    assert set(run(provider, **half)) == set(odds[0].nonzero().flatten().tolist())


@pytest.mark.parametrize("provider", ["numpy", "cpu", "reference"])
def test_min_p_brings_nothing_back_that_top_k_leaves_out(provider: str) -> None:
    """Where the last token of both has the very gap that min-p ends at."""
    limit = reference.gap_limits(torch.tensor([0.25])).item()
    logits = torch.tensor([0.0, -limit, -limit, -limit]).expand(200, -1).contiguous()
    given_ = arguments(logits, [(1.0, 2, 1.0, 0.25, seed, 0) for seed in range(200)])
    assert set(run(provider, **given_)) == {0, 1}


@pytest.mark.parametrize("provider", ["numpy", "cpu", "reference"])
def test_of_equal_largest_logits_the_lowest_id_is_chosen_beside_bans(provider: str) -> None:
    logits = torch.zeros(20, 300)
    given_ = arguments(logits, [(0.0, 0, 1.0, 0.0, seed, 0) for seed in range(20)])
    given_["banned"] = torch.arange(20, dtype=torch.int32).view(20, 1) % 3
    assert run(provider, **given_) == [int(row % 3 == 0) for row in range(20)]


@pytest.mark.parametrize("provider", ["numpy", "cpu", "reference"])
@pytest.mark.parametrize("vocab", [261, 256 + 31, 512])
def test_logits_below_zero_lose_to_larger_ones_and_to_nothing_beyond_them(provider: str, vocab: int) -> None:
    logits = torch.full((1, vocab), -2.0)
    logits[0, 3] = -1.0
    banned = torch.tensor([[vocab, vocab + 1]], dtype=torch.int32)
    for more in ({}, {"banned": banned}):
        assert run(provider, **arguments(logits, [(0.0, 0, 1.0, 0.0, 0, 0)], **more)) == [3]


def test_a_half_of_two_million_tokens_ends_at_the_last_token_that_reaches_it() -> None:
    """A share is enough where REACH of it is: of 2 ** 21 equal tokens, 2 ** 20 - 1 are a half."""
    assert 2**20 * reference.REACH == 2**20 - 1
    last = 2**20 - 1  # what this seed draws once it is kept
    given_ = arguments(torch.zeros(1, 2**21), [(1.0, 0, 0.5, 0.0, 2142072, 0)])
    assert run("cpu", **given_) != [last]
    assert run("cpu", **given_ | {"top_p": torch.tensor([0.5 + 2**-24])}) == [last]


def test_filters_that_are_off_draw_from_everything() -> None:
    odds = reference.kept_odds(
        torch.arange(512.0).expand(2, -1) / 8, *(torch.tensor([x, x]) for x in (0, 1.0, 0.0))
    )
    torch.testing.assert_close(odds, (-torch.arange(512.0).expand(2, -1) / 8).exp())


WRONG = [
    ({"logits": torch.zeros(2, 2, 5)}, r"logits is \[2, 2, 5\]"),
    ({"logits": torch.zeros(5, 2).T}, r"strides \[1, 2\]"),
    ({"logits": torch.zeros(2, 5, dtype=torch.int32)}, "torch.int32"),
    ({"num_valid_ids": 6}, "num_valid_ids is 6; wanted 1 to 5"),
    ({"num_valid_ids": 0}, "num_valid_ids is 0"),
    ({"temperature": torch.ones(3)}, r"temperature is \[3\]"),
    ({"top_k": torch.ones(2)}, r"top_k is \[2\] torch.float32"),
    ({"seeds": torch.zeros(4, dtype=torch.int64)[::2]}, r"seeds is .* strides \[2\]"),
    ({"positions": torch.zeros(2, dtype=torch.int32)}, "positions is"),
    ({"banned": torch.zeros(2, dtype=torch.int32)}, r"banned is \[2\]"),
    ({"banned": torch.zeros(3, 1, dtype=torch.int32)}, r"banned is \[3, 1\]"),
    (
        {"banned": torch.zeros(2, 4, dtype=torch.int32)[:, ::2]},
        r"banned is .* wanted \[2, 2\] torch.int32, contiguous",
    ),
    ({"out": torch.zeros(2, dtype=torch.int64)}, "out is"),
    ({"row_indices": torch.zeros(2, dtype=torch.int32)}, "row_indices is"),
    (
        {"row_indices": torch.zeros(2, dtype=torch.int64), "out": torch.zeros(3, dtype=torch.int32)},
        r"out is \[3\]",
    ),
    ({"chunks": torch.zeros(2, 2, 2)}, r"chunks is \[2, 2, 2\]"),
]


@pytest.mark.parametrize("change,message", WRONG, ids=[message for _, message in WRONG])
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        sample(**arguments(torch.zeros(2, 5), [(1, 0, 1, 0, 0, 0)] * 2) | change)


def test_a_batch_of_no_rows_is_sampled() -> None:
    given_ = arguments(torch.zeros(1, 300), [(1, 5, 0.5, 0, 0, 0)])
    sample(**{name: x[:0] if isinstance(x, Tensor) else x for name, x in given_.items()})


def test_opcheck() -> None:
    given_ = arguments(
        torch.randn(3, 300), [(0, 0, 1, 0, 0, 0), (1, 5, 1, 0, 1, 1), (1, 0, 0.5, 0.1, 2, 2)], 2
    )
    torch.library.opcheck(torch.ops.lamina.sample.default, tuple(given_.values()))
