"""lamina::top_logprobs: log_softmax in float64, ranks counted one by one, numbers JSON can hold."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import ShapeError
from lamina.custom_ops import top_logprobs
from lamina.custom_ops.top_logprobs import _cuda, reference
from lamina.custom_ops.top_logprobs.reference import BROKEN_RANK


def by_definition(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[list[Any], list[Any], list[int]]:
    """Ids, log-probabilities in float64 and ranks, row by row."""
    ids, logprobs, ranks = [], [], []
    for row, token in zip(logits.float(), token_ids.tolist(), strict=True):
        order = sorted(range(len(row)), key=lambda id_, row=row: (-float(row[id_]), id_))
        ids.append([token, *order[:num_top]])
        logprobs.append(row.double().log_softmax(-1)[ids[-1]].tolist())
        ranks.append(order.index(token) + 1)
    return ids, logprobs, ranks


@given(
    num_rows=st.integers(1, 5),
    vocab=st.sampled_from([1, 2, 7, 300]),
    levels=st.sampled_from([1, 3, 1000]),  # few of them: many equals
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_likeliest_tokens_come_in_order_with_their_log_softmax(
    num_rows: int, vocab: int, levels: int, dtype: torch.dtype, seed: int, data: Any
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randint(-levels, levels + 1, (num_rows, vocab), generator=generator) * 0.37).to(dtype)
    token_ids = torch.randint(vocab, (num_rows,), generator=generator, dtype=torch.int32)
    num_valid = data.draw(st.integers(int(token_ids.max()) + 1, vocab))
    num_top = data.draw(st.integers(0, num_valid))
    ids, logprobs, ranks = top_logprobs(logits, token_ids, num_valid, num_top)
    right = by_definition(logits[:, :num_valid], token_ids, num_top)
    assert (ids.tolist(), ranks.tolist()) == (right[0], right[2])
    torch.testing.assert_close(logprobs.double(), torch.tensor(right[1]).double(), rtol=1e-5, atol=1e-5)


def test_rows_in_several_blocks_are_the_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 400, generator=torch.Generator().manual_seed(0))
    token_ids = torch.arange(9, dtype=torch.int32)
    whole = top_logprobs(logits, token_ids, 400, 5)
    monkeypatch.setattr(reference, "ROWS_AT_ONCE", 4)
    blocks = top_logprobs(logits, token_ids, 400, 5)
    alone = [top_logprobs(logits[i : i + 1], token_ids[i : i + 1], 400, 5) for i in range(9)]
    for part in range(3):
        assert torch.equal(whole[part], blocks[part])
        assert torch.equal(whole[part], torch.cat([one[part] for one in alone]))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [slice(0, 1), slice(None)], ids=["one", "all"])
def test_whatever_the_logits_every_number_can_be_written_as_json(broken: float, place: slice) -> None:
    logits = torch.zeros(2, 300)
    logits[0, place] = broken
    ids, logprobs, ranks = top_logprobs(logits, torch.tensor([0, 1], dtype=torch.int32), 300, 300)
    json.dumps(logprobs.tolist(), allow_nan=False)
    assert sorted(ids[0, 1:].tolist()) == list(range(300))
    is_masked = broken == -torch.inf and place == slice(0, 1)  # which is nothing wrong, unless all are
    assert ranks.tolist() == [300 if is_masked else BROKEN_RANK, 2]
    torch.testing.assert_close(logprobs[1], torch.full((301,), 1 / 300).log())


def test_a_token_of_the_padding_is_impossible_and_ranks_after_all_others() -> None:
    ids, logprobs, ranks = top_logprobs(torch.zeros(1, 300), torch.tensor([290], dtype=torch.int32), 280, 2)
    assert (ids.tolist(), ranks.tolist()) == ([[290, 0, 1]], [281])
    assert logprobs[0, 0] == -9999
    torch.testing.assert_close(logprobs[0, 1:], torch.full((2,), 1 / 280).log())


def test_off_the_cpu_nothing_waits_for_values() -> None:
    ids, logprobs, ranks = reference.top_logprobs(
        torch.empty(70, 1000, device="meta"), torch.empty(70, dtype=torch.int32, device="meta"), 900, 3
    )
    assert (ids.shape, logprobs.shape, ranks.shape) == ((70, 4), (70, 4), (70,))


@pytest.mark.parametrize(
    "num_ids, num_top, fits",
    [(320, 320, True), (128256, 20, True), (256000, 20, True), (128256, 64, False), (1500, 1100, False)],
)
def test_the_kernel_of_a_gpu_takes_what_is_usually_wanted(num_ids: int, num_top: int, fits: bool) -> None:
    assert _cuda.fits(num_ids, num_top) == fits


@given(seed=st.integers(0, 1000), num_ids=st.integers(1, 5000), num_top=st.integers(1, 30), data=st.data())
def test_no_more_tokens_reach_the_last_of_the_best_than_the_kernel_has_room_for(
    seed: int, num_ids: int, num_top: int, data: Any
) -> None:
    """Tokens fall to threads in turns; what reaches the num_top-th of the threads' best is bounded."""
    num_top = min(num_top, num_ids)
    values = torch.randn(num_ids, generator=torch.Generator().manual_seed(seed))
    if data.draw(st.booleans()):  # the largest all in a few threads
        values = values.sort(descending=True).values
        values[:: _cuda.THREADS] += 10
    keys = reference.ordered_keys(values.unsqueeze(0))[0]
    missing = -num_ids % _cuda.THREADS
    columns = torch.cat((keys, keys.new_full((missing,), -(2**63)))).view(-1, _cuda.THREADS)
    last = columns.amax(dim=0).topk(num_top).values[-1]
    assert num_top <= int((keys >= last).sum()) <= num_top * -(-num_ids // _cuda.THREADS)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"logits": torch.zeros(3)}, r"logits is \[3\].*wanted \[n, vocab\]"),
    ({"logits": torch.zeros(3, 5, dtype=torch.int32)}, "logits is .*int32; wanted"),
    ({"token_ids": torch.zeros(2, dtype=torch.int32)}, r"token_ids is \[2\].*wanted \[3\] int32"),
    ({"token_ids": torch.zeros(3, dtype=torch.int64)}, "token_ids is .*int64; wanted"),
    ({"num_valid_ids": 0}, "num_valid_ids is 0; wanted 1 to 5"),
    ({"num_valid_ids": 6}, "num_valid_ids is 6; wanted 1 to 5"),
    ({"num_top": -1}, "num_top is -1; wanted 0 to"),
    ({"num_top": 5, "num_valid_ids": 4}, "num_top is 5; wanted 0 to num_valid_ids, 4"),
]


@pytest.mark.parametrize("change,message", WRONG, ids=[message for _, message in WRONG])
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    given_ = {"logits": torch.zeros(3, 5), "token_ids": torch.zeros(3, dtype=torch.int32)}
    with pytest.raises(ShapeError, match=message):
        top_logprobs(**{**given_, "num_valid_ids": 5, "num_top": 2, **change})


def test_opcheck() -> None:
    given_ = torch.randn(3, 300), torch.tensor([1, 2, 3], dtype=torch.int32), 290, 4
    torch.library.opcheck(torch.ops.lamina.top_logprobs.default, given_)
