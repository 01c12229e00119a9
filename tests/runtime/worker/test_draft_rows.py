"""Where a drafter's keys and values go: behind the model's tokens, whatever number each row has."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from lamina.runtime.worker.drafter import DraftInput
from lamina.runtime.worker.drafters.rows import one_further
from lamina.runtime.worker.input_batch import NO_SLOT, BatchView, InputBatch

BLOCK_SIZE, COLUMNS = 4, 6
ROWS = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 9), st.integers(1, 16)), min_size=1, max_size=5
)  # tokens, how many come before them, and for how many there are blocks


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@given(rows=ROWS, num_padding=st.integers(0, 2))
def test_every_token_goes_one_place_on_in_its_own_row(
    rows: list[tuple[int, int, int]], num_padding: int
) -> None:
    num_rows, num_tokens = len(rows) + num_padding, sum(count for count, _, _ in rows)
    batch = InputBatch(
        max_num_seqs=num_rows,
        max_num_tokens=64,
        max_blocks_per_seq=COLUMNS,
        block_size=BLOCK_SIZE,
        vocab_size=50,
        device=torch.device("cpu"),
        max_num_samples=64,
    )
    view = batch._layout((num_tokens + num_padding, num_rows, num_tokens + num_padding))[1]
    tables = view["block_tables"][0].copy_(
        torch.arange(num_rows * COLUMNS, dtype=torch.int32).view(num_rows, -1)
    )
    positions = [first + place for count, first, _ in rows for place in range(count)]
    view["positions"][:] = ints([*positions, *[0] * num_padding])
    view["slot_mappings"][0][:] = 0
    view["slot_mappings"][0][num_tokens:] = NO_SLOT
    view["seq_lens"][:] = ints([*(count + first for count, first, _ in rows), *[0] * num_padding])
    ends = ints([count for count, _, _ in rows]).cumsum(0).int()
    view["query_start_loc"][:] = torch.cat((ints([0]), ends, ends[-1:].expand(num_padding)))
    step = step_of(view, [room for _, _, room in rows], num_padding)
    moved = one_further(step, view["token_ids"], BLOCK_SIZE)
    wanted = [
        tables[row, (first + place + 1) // BLOCK_SIZE] * BLOCK_SIZE + (first + place + 1) % BLOCK_SIZE
        if first + place + 1 < room
        else NO_SLOT
        for row, (count, first, room) in enumerate(rows)
        for place in range(count)
    ]
    assert moved.slot_mappings[0].tolist() == [*map(int, wanted), *[NO_SLOT] * num_padding]
    assert moved.seq_lens.tolist() == [
        *(max(count, min(first + count + 1, room)) for count, first, room in rows),
        *[0] * num_padding,
    ]


def step_of(view: dict[str, Any], room: list[int], num_padding: int) -> DraftInput:
    """A step whose real rows are all sampled."""
    num_rows = len(room) + num_padding
    nothing = ints([0] * num_rows)
    batch = BatchView(
        num_tokens=0, num_seqs=len(room), num_samples=0, max_query_len=4, banned=nothing.view(-1, 1), **view
    )
    return DraftInput(
        batch=batch,
        request_ids=(),
        sampled=nothing,
        num_accepted=nothing,
        newest=nothing,
        num_computed=nothing,
        num_samples=ints([1] * len(room) + [0] * num_padding),
        first_samples=nothing,
        capacities=ints([*room, *[0] * num_padding]),
        hidden=torch.empty(0),
        aux_hidden=None,
        num_drafts=1,
    )
