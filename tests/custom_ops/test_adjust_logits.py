"""lamina::adjust_logits: one formula by every provider, transformers' numbers, arguments that do not fit."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import ShapeError
from lamina.custom_ops import adjust_logits
from lamina.custom_ops._shared.registry import providers, select

VOCAB = 40
ON_CPU = ("cpu", "numpy", "reference")


def arguments(
    logits: Tensor, tokens: list[list[int]], rows: Tensor | None = None, **change: Any
) -> dict[str, Any]:
    """The op's arguments for rows with these tokens, all of them of the prompt, and nothing to adjust.

    The history lacks the last token of each row, which is somewhere among the step's.
    """
    n, m = len(logits), len(tokens)
    rows = torch.arange(m) if rows is None else rows
    history = torch.full((m + 1, 12), 7, dtype=torch.int32)
    positions, last_tokens = torch.full((n,), -1), torch.full((n,), -1, dtype=torch.int32)
    token_ids = torch.full((n + 5,), 9, dtype=torch.int32)
    for number, (row, own) in enumerate(zip(rows.tolist(), tokens, strict=True)):
        history[number, : len(own) - 1] = torch.tensor(own[:-1], dtype=torch.int32)
        positions[row], last_tokens[row], token_ids[n + 4 - row] = len(own), n + 4 - row, own[-1]
    return {
        "logits": logits,
        "rows": rows,
        "history": history,
        "slots": torch.arange(m),
        "positions": positions,
        "token_ids": token_ids,
        "last_tokens": last_tokens,
        "num_prompt": torch.tensor([len(own) for own in tokens]).int(),
        "penalties": torch.tensor([[1.0], [0.0], [0.0]]).repeat(1, m),
        "bias_ids": torch.empty(m, 0, dtype=torch.int32),
        "biases": torch.empty(m, 0),
        "allowed": torch.empty(m, 0, dtype=torch.int32),
        "bad_words": torch.empty(m, 0, 0, dtype=torch.int32),
        "banned": torch.empty(n, 0, dtype=torch.int32),
        "temperature": torch.linspace(0, 2, m),
        "num_valid_ids": logits.shape[1],
        "out": torch.full((m, logits.shape[1]), torch.nan),
        "chunks": torch.full((m, -(-logits.shape[1] // 256), 2), torch.nan),
    } | change


def run(provider: str, given_: dict[str, Any]) -> Tensor:
    """The scores, which are the same where the history has the last token already."""
    dtype = given_["logits"].dtype
    call = select("adjust_logits", device=torch.device("cpu"), dtype=dtype, provider=provider).call
    outs = [torch.full_like(given_["out"], torch.nan) for _ in range(2)]
    history = given_["history"].clone()
    for out in outs:
        call(*(given_ | {"out": out, "history": history}).values())
    assert torch.equal(outs[0].view(torch.int32), outs[1].view(torch.int32))
    return outs[0]


def logits(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


ids = st.integers(-1, VOCAB + 1)
row = st.fixed_dictionaries(
    {
        "tokens": st.lists(st.integers(0, VOCAB + 1), min_size=1, max_size=12),
        "num_prompt": st.integers(0, 12),
        "penalties": st.tuples(
            st.sampled_from([1.0, 1.0, 1.3, 0.7, 1e-30]),
            st.sampled_from([0.0, 0.0, 0.4, -1.5]),
            st.sampled_from([0.0, 0.0, 0.3, -2.0]),
        ),
        "bias": st.dictionaries(st.integers(-1, VOCAB - 1), st.floats(-100, 100, width=32), max_size=3),
        "allowed": st.lists(st.booleans(), min_size=64, max_size=64),
        "bad_words": st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=3),
        "banned": st.lists(ids, min_size=2, max_size=2),
    }
)


def padded(rows: list[list[Any]], padding: int, dtype: torch.dtype) -> Tensor:
    longest = max(map(len, rows), default=0)
    table = [[*own, *[padding] * (longest - len(own))] for own in rows]
    return torch.tensor(table, dtype=dtype).view(len(rows), longest)


def table_of(words: list[list[list[int]]]) -> Tensor:
    most, longest = max(map(len, words)), max((len(word) for own in words for word in own), default=0)
    table = torch.full((len(words), most, longest), -1, dtype=torch.int32)
    for row, own in zip(table, words, strict=True):
        for place, word in zip(row, own, strict=False):
            place[longest - len(word) :] = torch.tensor(word)
    return table


def bits(allowed: list[list[bool]]) -> Tensor:
    values = [sum(bit << place for place, bit in enumerate(own)) for own in allowed]
    words = [[value & 0xFFFFFFFF, value >> 32] for value in values]
    return torch.tensor([[w - 2**32 if w >= 2**31 else w for w in own] for own in words], dtype=torch.int32)


@given(
    rows=st.lists(row, min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    num_valid_ids=st.sampled_from([VOCAB, VOCAB - 5]),
    is_restricted=st.booleans(),
    seed=st.integers(0, 100),
)
def test_every_provider_has_the_formulas_bits(
    rows: list[dict[str, Any]], dtype: torch.dtype, num_valid_ids: int, is_restricted: bool, seed: int
) -> None:
    values = logits(len(rows) + 2, VOCAB, seed=seed).to(dtype)
    values[0, 5] = -torch.inf
    values[1, 3], values[-1, 6] = torch.nan, torch.inf
    given_ = arguments(
        values,
        [own["tokens"] for own in rows],
        torch.arange(len(rows)).flip(0) + 1,
        num_prompt=torch.tensor([min(own["num_prompt"], len(own["tokens"])) for own in rows]).int(),
        penalties=torch.tensor([own["penalties"] for own in rows]).T.contiguous(),
        bias_ids=padded([list(own["bias"]) for own in rows], -1, torch.int32),
        biases=padded([list(own["bias"].values()) for own in rows], 0, torch.float32),
        bad_words=table_of([own["bad_words"] for own in rows]),
        banned=torch.tensor([[-1, -1], *(own["banned"] for own in rows[::-1]), [3, 3]]).int(),
        num_valid_ids=num_valid_ids,
        out=torch.full((len(rows), VOCAB + 8), torch.nan),
    )
    if is_restricted:
        given_["allowed"] = bits([own["allowed"] for own in rows])
    expected = run("reference", given_)
    for provider in ON_CPU:
        assert torch.equal(run(provider, given_).view(torch.int32), expected.view(torch.int32)), provider
    assert (expected[:, num_valid_ids:] == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_large_vocabulary_has_the_formulas_bits(dtype: torch.dtype) -> None:
    """Ids around the ends of slices and words: said, banned, biased, not allowed."""
    num_ids, m = 3 * 8192 + 77, 3
    limits = [limit + near for limit in (0, 8192, 16384, 24576, num_ids) for near in (-33, -1, 0, 1, 32)]
    own = [id_ for id_ in limits if 0 <= id_ < num_ids]
    table = torch.tensor([own] * m, dtype=torch.int32)
    generator = torch.Generator().manual_seed(3)
    given_ = arguments(
        logits(m, num_ids + 3).to(dtype),
        [own[i : i + 9] for i in range(m)],
        num_prompt=torch.tensor([0, 4, 9]).int(),
        penalties=torch.tensor([[1.3, 0.7, 1.0], [0.4, 0.0, -0.3], [0.1, 0.0, 0.2]]),
        bias_ids=table,
        biases=torch.randn(m, len(own), generator=generator),
        allowed=torch.randint(-(2**31), 2**31, (m, -(-num_ids // 32)), generator=generator).int(),
        bad_words=table.unsqueeze(-1)[:, ::5].contiguous(),
        banned=table[:, 1::4].contiguous(),
        num_valid_ids=num_ids,
        out=torch.full((m, num_ids + 3), torch.nan),
    )
    expected = run("reference", given_)
    for provider in ON_CPU:
        assert torch.equal(run(provider, given_).view(torch.int32), expected.view(torch.int32)), provider


@pytest.mark.parametrize("provider", ON_CPU)
def test_prompt_and_answer_are_distinguished(provider: str) -> None:
    """Repetition counts both and once, presence the answer and once, frequency the answer each time."""
    values = logits(1, VOCAB)
    values[0, 5], values[0, 6], values[0, 8] = 4.0, -3.0, 2.0

    def with_answer(*answer: int, penalties: tuple[float, float, float]) -> Tensor:
        tokens = [5, 5, 6, *answer]
        changed = {"penalties": torch.tensor(penalties).view(3, 1), "num_prompt": torch.tensor([3]).int()}
        return run(provider, arguments(values, [tokens], **changed))[0] - values[0]

    assert with_answer(penalties=(2.0, 0.0, 0.0))[[5, 6, 8]].tolist() == [-2.0, -3.0, 0.0]
    assert with_answer(penalties=(1.0, 0.5, 0.25))[[5, 6, 8]].tolist() == [0.0, 0.0, 0.0]
    assert with_answer(8, 5, 8, penalties=(1.0, 0.5, 0.25))[[5, 6, 8]].tolist() == [-0.75, 0.0, -1.25]
    assert with_answer(8, 8, penalties=(2.0, 0.0, 0.0))[[5, 6, 8]].tolist() == [-2.0, -3.0, -1.0]


@pytest.mark.parametrize("provider", ON_CPU)
def test_repetition_and_bad_words_are_those_of_transformers(provider: str) -> None:
    from transformers.generation.logits_process import (
        NoBadWordsLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
    )

    tokens = [[1, 2, 3, 2], [9, 1, 2, 1]]
    words = [[2, 1], [3], [1, 2, 1, 4], [2, 1, 6], [9]]
    values, input_ids = logits(2, VOCAB), torch.tensor(tokens)
    given_ = arguments(values, tokens, penalties=torch.tensor([[1.7] * 2, [0] * 2, [0] * 2]))
    expected = RepetitionPenaltyLogitsProcessor(1.7)(input_ids, values)
    assert torch.equal(run(provider, given_), expected)
    given_ = arguments(values, tokens, bad_words=table_of([words, words]))
    assert torch.equal(run(provider, given_), NoBadWordsLogitsProcessor(words)(input_ids, values))


@pytest.mark.parametrize("provider", ON_CPU)
def test_the_newest_token_is_remembered_and_a_row_without_chunks_left_alone(provider: str) -> None:
    given_ = arguments(logits(4, VOCAB), [[1, 2, 3], [5]], torch.tensor([3, 1]))
    history = given_["history"]
    run_with = select(
        "adjust_logits", device=torch.device("cpu"), dtype=torch.float32, provider=provider
    ).call
    run_with(*(given_ | {"chunks": given_["chunks"][:, :0]}).values())
    assert history[0].tolist() == [1, 2, 3] + [7] * 9
    assert history[1].tolist() == [5] + [7] * 11
    assert (history[2] == 7).all()
    assert given_["chunks"].isnan().all()


@pytest.mark.parametrize("provider", ON_CPU)
@pytest.mark.parametrize("way", ["banned", "allowed", "bad_words"])
def test_an_exclusion_hides_no_broken_logit(provider: str, way: str) -> None:
    values = logits(3, VOCAB)
    values[0, 9], values[1, 9] = torch.nan, torch.inf
    given_: dict[str, Any] = {
        "banned": torch.full((3, 1), 9, dtype=torch.int32),
        "allowed": bits([[id_ != 9 for id_ in range(VOCAB)]] * 3),
        "bad_words": table_of([[[9]]] * 3),
    }
    penalties = torch.tensor([[1.7] * 3, [0.5] * 3, [0.1] * 3])
    out = run(provider, arguments(values, [[9, 9]] * 3, penalties=penalties, **{way: given_[way]}))
    assert out[0, 9].isnan()
    assert out[1, 9] == torch.inf
    assert out[2, 9] == -torch.inf


@pytest.mark.parametrize("provider", ON_CPU)
def test_chunks_say_what_sampling_would_find(provider: str) -> None:
    """The largest of every 256 ids, and exp((score - largest) / temperature) summed over them."""
    values = logits(3, 600)
    values[1, 256:512] = -torch.inf
    given_ = arguments(values, [[1], [2], [3]], num_valid_ids=590)
    scores, chunks = run(provider, given_), given_["chunks"]
    for row, temperature in enumerate(given_["temperature"].tolist()):
        for chunk, part in enumerate(scores[row, :590].split(256)):
            largest, odds = chunks[row, chunk].tolist()
            assert largest == part.max()
            expected = (
                ((part - largest) / temperature).exp().sum() if temperature and largest > -1e30 else 0.0
            )
            assert odds == pytest.approx(float(expected), rel=1e-5)


WRONG = [
    ({"logits": torch.zeros(2, VOCAB).int()}, "logits is"),
    ({"num_valid_ids": VOCAB + 1}, f"num_valid_ids is {VOCAB + 1}; wanted 1 to {VOCAB}"),
    ({"rows": torch.zeros(2).int()}, "rows is"),
    ({"slots": torch.zeros(3).long()}, r"slots is \[3\]"),
    ({"history": torch.zeros(2, 4)}, "history is"),
    ({"penalties": torch.zeros(2, 3)}, r"penalties is \[2, 3\]"),
    ({"biases": torch.zeros(2, 1)}, r"biases is \[2, 1\]"),
    ({"allowed": torch.zeros(2, 1).int()}, "allowed has 1 words a row; wanted 0 or 2"),
    ({"bad_words": torch.zeros(2, 1).int()}, r"bad_words is \[2, 1\]"),
    ({"banned": torch.zeros(2, 4).int()[:, ::2]}, "banned is .* contiguous"),
    ({"positions": torch.zeros(3).long()}, r"positions is \[3\]"),
    ({"last_tokens": torch.zeros(2).long()}, "last_tokens is .* torch.int64"),
    ({"temperature": torch.zeros(3)}, r"temperature is \[3\]"),
    ({"chunks": torch.zeros(2, 2, 2)}, r"chunks is \[2, 2, 2\]"),
    ({"out": torch.zeros(2, VOCAB - 1)}, "out is"),
    ({"out": torch.zeros(2, 2 * VOCAB)[:, ::2]}, "out has strides"),
]


@pytest.mark.parametrize("change,message", WRONG, ids=[message for _, message in WRONG])
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        adjust_logits(**arguments(logits(2, VOCAB), [[1], [2]]) | change)


def test_opcheck() -> None:
    assert providers("adjust_logits")[-1] == "reference"
    given_ = arguments(logits(2, VOCAB), [[1, 2], [3]])
    torch.library.opcheck(torch.ops.lamina.adjust_logits.default, tuple(given_.values()))
