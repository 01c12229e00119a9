"""CUDA kernels compiled as C++ and run thread by thread: the formulas' bits, or their tokens."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lamina.custom_ops._shared.registry import select
from lamina.custom_ops.sample.reference import BROKEN

from . import host_kernels
from .conftest import workspace
from .guarded import at_the_end

pytestmark = pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")


def formula(op: str) -> Callable[..., Any]:
    return select(op, device=torch.device("cpu"), dtype=torch.float32, provider="reference").call


def same_bits(a: Tensor, b: Tensor) -> bool:
    plain = (torch.where(x.isnan(), torch.nan, x) for x in (a, b))  # NaN has a sign that nobody reads
    return torch.equal(*(x.view(torch.int32) for x in plain))


class Adjusting(NamedTuple):
    """Arguments of adjust_logits, and what of them a test looks at again."""

    given: list[Any]
    history: Tensor
    slots: Tensor
    lengths: Tensor
    newest: Tensor
    num_valid_ids: int


def adjusting(seed: int, vocab: int, m: int = 3) -> Adjusting:
    """m of 5 rows with everything that may be adjusted, at the edges of slices and of threads."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int, of: torch.Generator = generator) -> Tensor:
        return torch.randint(low, high, shape, generator=of, dtype=torch.int32)

    def ids(*shape: int, of: Callable[..., Tensor] = integers) -> Tensor:
        edge = 8180 if vocab > 8192 else 0  # just before that of a slice
        return of(0, 30, *shape) + edge * of(0, 2, *shape)

    history, slots, rows = (
        ids(4, 600),
        torch.tensor([1, 3, 0]),
        torch.tensor([4, 0, 2]),
    )
    positions, token_ids = integers(4, 600, 5).long(), ids(9)
    logits = torch.randn(5, vocab, generator=generator) * 3
    logits[4, 3], logits[0, vocab - 9] = torch.nan, torch.inf
    last_tokens = torch.randperm(9, generator=generator)[:5].int()
    lengths, newest = positions[rows], token_ids[last_tokens[rows].long()]
    words = torch.full((m, 3, 3), -1, dtype=torch.int32)
    for word, slot, length, token in zip(words, slots.tolist(), lengths.tolist(), newest, strict=True):
        word[0, :2] = torch.stack((history[slot, length - 2], token))  # met
        word[1, 1] = token + 1  # not met
        word[:, 2] = torch.randperm(vocab, generator=generator)[:3]
    many = 600 if seed > 1 else 2  # more than there are threads
    unmet = torch.where(torch.arange(3) == 1, token_ids.max() + 1, 7).int().expand(m, many, 3)
    words = torch.cat((unmet, words), dim=1)
    banned = integers(-1, vocab + 3, 5, many)
    banned[:, -1] = min(vocab - 1, 8192)  # the first id of the second slice
    num_valid_ids, has_all = vocab - seed % 3, seed % 2 == 0
    num_biases, num_words = (many + 2, -(-num_valid_ids // 32)) if has_all else (0, 0)
    given = [
        at_the_end(logits),
        rows,
        history,
        slots,
        positions,
        token_ids,
        last_tokens,
        (lengths * torch.rand(m, generator=generator)).int(),
        torch.tensor([[1.0, 1.7, 0.6], [0.4, 0.0, -1.0], [0.3, -0.7, 0.0]]),
        torch.randperm(vocab, generator=generator)[:num_biases].int().repeat(m, 1),
        torch.randn(m, min(num_biases, vocab), generator=generator),
        integers(-(2**31), 2**31 - 1, m, num_words),
        words if has_all else words[:, :0].contiguous(),
        banned,
        torch.tensor([0.0, 0.7, 1.5]),
        num_valid_ids,
    ]
    return Adjusting(given, history, slots, lengths, newest, num_valid_ids)


@pytest.mark.parametrize("vocab", [40, 41, 9000])  # one slice, also not read in vectors; and part of a second
def test_adjusted_logits_have_the_formulas_bits(on_host: Any, vocab: int) -> None:
    kernel, m = on_host("adjust_logits"), 3
    for seed in range(4):
        given, history, slots, lengths, newest, num_valid_ids = adjusting(seed, vocab, m)
        width, num_chunks = vocab + 8 - seed // 2, -(-num_valid_ids // 256)  # in vectors, and not
        width += seed % 2 * 300  # and chunks that nobody has asked for
        results = []
        for call in (kernel, formula("adjust_logits")):
            given[2] = history.clone()
            chunks = torch.full((m + 1, num_chunks, 2), torch.nan)  # and a row that nobody writes
            results.append((torch.full((m, width), torch.nan), chunks[:m]))
            call(*given, *results[-1])
            assert chunks[m].isnan().all()
            assert torch.equal(given[2][slots, lengths - 1], newest)
        assert same_bits(results[0][0], results[1][0])
        assert same_bits(results[0][1][:, :, 0].contiguous(), results[1][1][:, :, 0].contiguous())
        torch.testing.assert_close(results[0][1], results[1][1], equal_nan=True)


def test_a_word_may_begin_where_the_history_does_and_with_id_0(on_host: Any) -> None:
    longs, none = torch.zeros(1, dtype=torch.int64), torch.empty(1, 0, dtype=torch.int32)
    for first, is_met in ((0, True), (5, False)):
        scores, chunks = torch.empty(1, 40), torch.empty(1, 0, 2)
        on_host("adjust_logits")(
            *(torch.ones(1, 40), longs, torch.tensor([[first, -7, 9]], dtype=torch.int32), longs, longs + 2),
            *(
                torch.tensor([6], dtype=torch.int32),
                longs.int(),
                longs.int() + 2,
                torch.tensor([[1.0], [0], [0]]),
            ),
            *(none, none.float(), none, torch.tensor([[[0, 6, 30]]], dtype=torch.int32), none),
            *(torch.ones(1), 40, scores, chunks),
        )
        assert (scores[0, 30] == -torch.inf) == is_met


@pytest.mark.parametrize("vocab,scale", [(300, 0.0), (3001, 1.0), (3001, 30.0), (9001, 1.0)])
def test_tokens_are_those_of_the_formula(on_host: Any, vocab: int, scale: float) -> None:
    """Every way through the filters: few tokens and many, of which some or all are equal."""
    kernel, generator = on_host("sample"), torch.Generator().manual_seed(vocab)
    logits = torch.randn(4, vocab, generator=generator) * scale
    logits[1] = logits[1].round()
    logits[2] = torch.where(torch.rand(vocab, generator=generator) < 0.01, 1.0, -1.0)
    for top_k, top_p, min_p in [
        (0, 0.9, 0.0),
        (0, 0.2, 0.0),
        (40, 0.8, 0.05),
        (3000, 1.0, 0.0),
        (0, 1.0, 0.1),
    ]:
        settings = (
            torch.tensor([1.0, 0.7, 1.0, 0.0]),
            torch.full((4,), top_k, dtype=torch.int32),
            torch.full((4,), top_p),
            torch.full((4,), min_p),
            torch.randint(-(2**40), 2**40, (4,), generator=generator),
            torch.arange(7) * 31,
            torch.randint(-1, vocab, (7, 3), generator=generator, dtype=torch.int32),
            vocab - 1,
        )
        row_indices = torch.tensor([6, 2, 0, 5])
        outs = [torch.full((7,), -77, dtype=torch.int32) for _ in range(2)]
        for call, out in zip((kernel, formula("sample")), outs, strict=True):
            call(at_the_end(logits), *settings, out, row_indices)
        assert torch.equal(*outs)


def test_each_of_many_rows_gets_its_own_tokens(on_host: Any) -> None:
    """So many that those with filters, which take longest, are begun first."""
    num_rows, rows = 100, torch.arange(100)
    logits = torch.randn(num_rows, 40, generator=torch.Generator().manual_seed(5))
    is_drawn = (rows % 25 == 3).float()
    none = torch.empty(num_rows, 0, dtype=torch.int32)
    settings = is_drawn, rows.int() * 0, 1 - is_drawn / 10, is_drawn * 0, rows, rows, none, 40
    outs = [torch.full((num_rows,), -77, dtype=torch.int32) for _ in range(2)]
    for call, out in zip((on_host("sample"), formula("sample")), outs, strict=True):
        call(logits, *settings, out)
    assert torch.equal(*outs)


@pytest.mark.parametrize("temperature, top_p", [(0.0, 1.0), (1.0, 0.9)])
def test_rows_of_broken_logits_get_no_token(on_host: Any, temperature: float, top_p: float) -> None:
    logits = torch.randn(8, 600, generator=torch.Generator().manual_seed(0))
    logits[0, [500, 20]], logits[1, 599], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 3:] = -torch.inf
    logits[4, 7], logits[5, 7], logits[6] = torch.nan, torch.inf, -torch.inf
    logits[6, 7] = 1.0
    banned, ones = torch.full((8, 2), 7, dtype=torch.int32), torch.ones(8)
    longs = torch.arange(8)
    settings = ones * temperature, longs.int() * 0, ones * top_p, ones * 0, longs, longs, banned, 600
    outs = [torch.full((8,), -77, dtype=torch.int32) for _ in range(2)]
    for call, out in zip((on_host("sample"), formula("sample")), outs, strict=True):
        call(logits, *settings, out)
    assert torch.equal(*outs)
    assert [token == BROKEN for token in outs[0].tolist()] == [True] * 3 + [False] + [True] * 3 + [False]


@pytest.mark.parametrize("shares", [[3, 1, 1, 5], [4, 4, 2]], ids=str)
def test_a_share_that_is_reached_exactly_is_enough(on_host: Any, shares: list[int]) -> None:
    """Draws with seeds for which one token more would be drawn if it were kept, and the last one that is."""
    logits = torch.tensor([shares], dtype=torch.float64).log().float()
    order = sorted(range(len(shares)), key=lambda id_: (-shares[id_], id_))

    def drawn(call: Callable[..., Any], top_p: float, seeds: Tensor) -> Tensor:
        out, ones, none = seeds.int(), torch.ones(len(seeds)), torch.empty(len(seeds), 0, dtype=torch.int32)
        rows = logits.expand(len(seeds), -1).contiguous()
        filters = ones, seeds.int() * 0, ones * top_p, ones * 0
        call(rows, *filters, seeds, seeds * 0, none, len(shares), out)
        return out

    for count in range(1, len(shares)):
        edge, seeds = sum(shares[id_] for id_ in order[:count]) / sum(shares), torch.arange(200)
        wider, right = (drawn(formula("sample"), top_p, seeds) for top_p in (edge + 1e-4, edge))
        picked = [(wider == order[count]).int().argmax(), (right == order[count - 1]).int().argmax()]
        picked = torch.stack(picked)
        assert torch.equal(drawn(on_host("sample"), edge, picked), right[picked])
        assert right[picked][1] == order[count - 1]
        assert wider[picked][0] == order[count] != right[picked][0]


def test_chunks_that_adjusting_leaves_are_those_that_sampling_finds(on_host: Any) -> None:
    """To the bit, since a draw must not depend on what others in its batch want."""
    adjust, sample, m, vocab = on_host("adjust_logits"), on_host("sample"), 3, 604
    generator = torch.Generator().manual_seed(vocab)
    none, longs, columns = torch.empty(m, 0, dtype=torch.int32), torch.arange(m), torch.ones(m)
    for width in (vocab, vocab + 2):  # in vectors, and not
        scores, num_chunks = torch.empty(m, width), -(-vocab // 256)
        chunks = torch.full((m, num_chunks, 2), torch.nan)
        adjust(
            torch.randn(m, vocab, generator=generator) * 3,
            *(longs, torch.arange(60, dtype=torch.int32).view(m, 20), longs, longs + 9),
            *(longs.int(), longs.int(), longs.int(), torch.tensor([[1.2] * m, [0.3] * m, [0.1] * m])),
            *(none, none.float(), none, none.unsqueeze(-1), none, columns * 0.8, vocab, scores, chunks),
        )
        tokens = [torch.empty(m, dtype=torch.int32) for _ in range(2)]
        for out, known in zip(tokens, (None, chunks), strict=True):
            sample(
                *(scores, columns * 0.8, longs.int() * 0, columns, columns * 0, longs, longs, none),
                *(vocab, out, None, known),
            )
        found = workspace(scores.device, 2 * m * num_chunks).view_as(chunks)
        assert same_bits(chunks, found)
        assert torch.equal(*tokens)


@pytest.mark.parametrize("vocab", [7, 50, 3000])
def test_what_is_typical_is_what_the_formula_keeps(on_host: Any, vocab: int) -> None:
    kernel, generator = on_host("keep_typical"), torch.Generator().manual_seed(vocab)
    temperature = torch.tensor([1.0, 0.5, 1.7, 1.0, 1.0, 1.0, 0.0, 1.0])
    typical_p = torch.tensor([0.1, 0.9, 0.5, 0.99, 0.3, 0.2, 0.5, 1.0])
    for scale in (0.5, 3.0, 8.0):
        logits = torch.randn(8, vocab, generator=generator) * scale
        logits[1, : vocab // 3] = -torch.inf
        logits[2] = logits[2].round()
        logits[3, 2], logits[4, 3] = (torch.nan, torch.inf) if scale == 8.0 else (0.0, 0.0)
        logits[5] = -torch.inf if scale == 8.0 else 0.0
        outs = [at_the_end(logits), logits.clone()]
        for call, out in zip((kernel, formula("keep_typical")), outs, strict=True):
            call(out, temperature, typical_p)
        assert same_bits(*outs)
        assert not same_bits(outs[0], logits)


@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("num_ids", [20, 5000])
def test_the_likeliest_are_those_of_the_formula(on_host: Any, num_ids: int, num_top: int) -> None:
    kernel, generator = on_host("top_logprobs"), torch.Generator().manual_seed(num_ids)
    logits = torch.randn(8, num_ids + 3, generator=generator) * 3
    logits[1] = logits[1].round()
    logits[2], logits[2, ::3] = 0.0, -0.0
    logits[3, ::1024] += 50  # all of one thread's
    logits[4, 7], logits[5] = torch.inf, -torch.inf
    logits[6, 3], logits[7] = torch.nan, 0.0
    token_ids = torch.tensor([5, 0, num_ids - 1, 3, 7, num_ids + 1, -1, num_ids], dtype=torch.int32)
    got = kernel(at_the_end(logits), token_ids, num_ids, num_top)
    right = formula("top_logprobs")(logits, token_ids, num_ids, num_top)
    assert right[2].tolist()[4:] == [0, 0, 0, num_ids + 1]
    if num_top == 0 or num_ids > 20:  # else NaN is among the likeliest, and has no order
        got[0][6, 1:] = right[0][6, 1:]
    assert torch.equal(got[0], right[0])
    assert torch.equal(got[2], right[2])
    torch.testing.assert_close(got[1], right[1], rtol=1e-5, atol=1e-5)


def reported(on_host: Any, logits: Tensor, num_top: int) -> None:
    """The kernel's report of the first ids of rows is the formula's, and exactly so where it is whole."""
    token_ids = torch.arange(len(logits), dtype=torch.int32)
    got = on_host("top_logprobs")(at_the_end(logits), token_ids, logits.shape[1], num_top)
    right = formula("top_logprobs")(logits, token_ids, logits.shape[1], num_top)
    assert torch.equal(got[0], right[0])
    assert torch.equal(got[2], right[2])
    torch.testing.assert_close(got[1], right[1], rtol=1e-5, atol=1e-5)


def test_the_likeliest_have_the_logprobs_of_their_own_logits(on_host: Any) -> None:
    """Of logits of which neighbours are whole numbers apart, and of the lowest that there is."""
    logits = 2.0**27 - 8 * torch.arange(40.0).flip(0)
    lowest = torch.tensor([torch.finfo(torch.float32).min, *[0.0] * 39])
    lowest[2:] = torch.finfo(torch.float32).min
    reported(on_host, torch.stack((logits, lowest)), 20)


def test_the_likeliest_fill_their_room_and_no_more(on_host: Any) -> None:
    """Every token of as many threads as are asked for, the last thread's among them; and of none."""
    num_top, vocab = 20, 1024 * 52
    thread = torch.arange(vocab) % 1024
    logits = torch.where(thread >= 1024 - num_top, 2.0, 1.0) - torch.arange(vocab) / 2**20
    logits[5] = 1.5  # the next one
    reported(on_host, logits[None], num_top)
    reported(on_host, logits[None], 0)


def typical(on_host: Any, gaps: list[float], typical_p: list[float]) -> Tensor:
    """What the kernel keeps of a row of such gaps for each share."""
    logits = -torch.tensor(gaps).expand(len(typical_p), -1)
    out = at_the_end(logits)
    on_host("keep_typical")(out, torch.ones(len(typical_p)), torch.tensor(typical_p))
    right = logits.clone()
    formula("keep_typical")(right, torch.ones(len(typical_p)), torch.tensor(typical_p))
    assert same_bits(out, right)
    return out.isfinite()


HALF = 0.6931472  # a gap whose odds are a half exactly


def test_a_typical_share_that_is_reached_exactly_is_enough(on_host: Any) -> None:
    """Six tokens of four in all and the likeliest, then a trace that is just missing."""
    assert (-torch.tensor(HALF)).exp() == 0.5
    kept = typical(on_host, [0.0, *[HALF] * 6], [0.75, 0.0, 1e-20])
    assert kept.tolist() == [[False] + [True] * 6] * 3
    out = torch.tensor(
        [[0.0, *[-HALF] * 6, -27.6]]
    )  # its odds are 2 ** -40: 1 of the 2 ** 42 that are summed
    on_host("keep_typical")(out, torch.ones(1), torch.tensor([0.75]))
    assert out.isfinite().tolist() == [[True] * 7 + [False]]


def test_what_lies_where_the_next_digit_begins_is_not_typical_of_a_share_that_is_reached(
    on_host: Any,
) -> None:
    """The second's distance is 2, and the share is that of the first to the last of 40 bits."""
    out = torch.tensor([[0.0, -2.2292974, -6.01829386]])
    on_host("keep_typical")(out, torch.ones(1), torch.tensor([0.900870204]))
    assert out.isfinite().tolist() == [[True, False, False]]


def test_of_typical_neighbours_the_last_one_kept_is_the_formulas(on_host: Any) -> None:
    """Of tokens whose distances are one place of a float apart."""
    gaps = [0.0, *(9 + i * 2.0**-20 for i in range(64))]
    shares = [1 - (64 - i - 0.5) * 1.2341e-4 / (1 + 64 * 1.2341e-4) for i in range(20, 28)]
    kept = typical(on_host, gaps, shares).sum(-1).tolist()
    assert len(set(kept)) > 4
