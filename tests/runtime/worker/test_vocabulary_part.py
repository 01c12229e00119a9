"""Greedy ids out of parts of the vocabulary: on every rank those that whole rows give."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.custom_ops.all_reduce.group import Group
from lamina.runtime.worker.sampler import SamplingRows, sample
from lamina.runtime.worker.vocabulary_part import VocabularyPart

from ...ranks import as_threads

DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64
NUMBERS = [0.0, -0.0, 1.0, 1.0, -2.0, float("-inf")]  # few, so that many are equal
ODD = [*NUMBERS, float("inf"), float("nan")]


def of_whole_rows(logits: Tensor, banned: Tensor, num_valid_ids: int) -> list[int]:
    num = len(logits)
    rows = SamplingRows(
        temperature=torch.zeros(num),
        top_k=torch.zeros(num, dtype=torch.int32),
        top_p=torch.ones(num),
        min_p=torch.zeros(num),
        seeds=torch.zeros(num, dtype=torch.int64),
        positions=torch.zeros(num, dtype=torch.int64),
        banned=banned,
        num_valid_ids=num_valid_ids,
    )
    return sample(logits, rows).tolist()


@given(data=st.data(), ranks=st.integers(2, 4), dtype=st.sampled_from(DTYPES))
def test_ids_are_those_of_whole_rows(data: st.DataObject, ranks: int, dtype: torch.dtype) -> None:
    num, vocab = data.draw(st.integers(1, 3)), data.draw(st.integers(ranks, 21))
    numbers = st.lists(
        st.sampled_from(data.draw(st.sampled_from([NUMBERS, ODD]))), min_size=vocab, max_size=vocab
    )
    logits = torch.tensor(data.draw(st.lists(numbers, min_size=num, max_size=num)), dtype=dtype)
    num_valid_ids = data.draw(st.integers(1, vocab))
    bans = st.lists(st.integers(-1, vocab + 2), min_size=4, max_size=4)
    banned = torch.tensor(data.draw(st.lists(bans, min_size=num, max_size=num)), dtype=torch.int32)
    own_ids = -(-vocab // ranks)
    padding = torch.full((num, own_ids * ranks - vocab), 7.0, dtype=dtype)  # larger than any id's
    parts = torch.cat((logits, padding), 1).split(own_ids, dim=1)

    def choose(group: Group) -> list[int]:
        part = VocabularyPart(
            lambda hidden: parts[group.rank].clone(), group, num_own_ids=own_ids, num_valid_ids=num_valid_ids
        )
        out = torch.full((num,), -7, dtype=torch.int32)
        part.choose(torch.empty(num, 0), banned, out)
        return out.tolist()

    expected = of_whole_rows(logits, banned, num_valid_ids)
    assert as_threads(ranks, choose) == [expected] * ranks
