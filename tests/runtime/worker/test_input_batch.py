"""The input batch against a writer of one token at a time, from whatever state earlier steps left it in."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.runtime.protocol.scheduler_output import (
    ON_HOST,
    SAMPLING,
    SchedulerOutput,
    no_requests,
    sampling_row,
)
from lamina.runtime.sampling_params import SamplingParams
from lamina.runtime.worker.input_batch import MAX_BANNED, NO_ID, InputBatch

BLOCK_SIZE, MAX_BLOCKS, MAX_SEQS, MAX_TOKENS, VOCAB = 3, 5, 4, 24, 50


class Part(NamedTuple):
    """One row of a plan, as this page writes it down."""

    name: str
    tokens: tuple[int, ...]
    computed: int
    blocks: tuple[int, ...]
    source: int  # of the last token: the sample of the step before, or ON_HOST
    samples: bool
    banned: tuple[int, ...]
    params: SamplingParams


class Sender:
    """A scheduler's part of the bargain: it knows which tables are held, and sends what is new."""

    def __init__(self) -> None:
        self.tables: list[tuple[str, tuple[int, ...]]] = []

    def plan(self, *parts: Part) -> SchedulerOutput:
        new = []
        for row, part in enumerate(parts):
            name, table = self.tables[row] if row < len(self.tables) else ("", ())
            kept = len(table) if name == part.name and part.blocks[: len(table)] == table else 0
            new += [(row, column, part.blocks[column]) for column in range(kept, len(part.blocks))]
        self.tables[: len(parts)] = [(part.name, part.blocks) for part in parts]
        sampled = [part for part in parts if part.samples]
        tokens = [
            part.tokens[:-1] + ((part.tokens[-1],) if part.source == ON_HOST else (0,)) for part in parts
        ]
        return SchedulerOutput(
            step=1,
            request_ids=tuple(part.name for part in parts),
            num_scheduled_tokens=np.array([len(part.tokens) for part in parts], np.int64),
            num_computed_tokens=np.array([part.computed for part in parts], np.int64),
            token_ids=np.array([token for row in tokens for token in row], np.int32),
            sources=np.array([part.source for part in parts], np.int64),
            num_sampled_tokens=np.array([part.samples for part in parts], np.int64),
            sampling=np.array([sampling_row(part.params) for part in sampled], SAMPLING),
            banned=tuple((row, part.banned) for row, part in enumerate(sampled) if part.banned),
            new_blocks=np.array(new, np.int64).reshape(-1, 3).T,
        )


def input_batch(device: str = "cpu") -> InputBatch:
    return InputBatch(
        max_num_seqs=MAX_SEQS,
        max_num_tokens=MAX_TOKENS,
        max_blocks_per_seq=MAX_BLOCKS,
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB,
        device=torch.device(device),
    )


def part(
    name: str = "a",
    tokens: Any = (1,),
    computed: int = 0,
    blocks: Any = (1, 2, 3, 4, 5),
    source: int = ON_HOST,
    samples: bool = True,
    banned: Any = (),
    **params: Any,
) -> Part:
    resolved = SamplingParams(**params).resolve(None, seed=0)
    return Part(name, tuple(tokens), computed, tuple(blocks), source, samples, tuple(banned), resolved)


def write(batch: InputBatch, plan: SchedulerOutput, *sizes: int | None) -> Any:
    view = batch.write(plan, *sizes)
    batch.take_token_ids(view)
    return view


def written_one_by_one(
    parts: tuple[Part, ...], padded_tokens: int, padded_seqs: int, padded_samples: int
) -> dict[str, list[Any]]:
    """Every field as the docstrings define it, in plain lists; tables as far as they are read."""
    names = ("token_ids", "positions", "slot_mapping", "seq_lens", "logits_rows", "sample_positions")
    out: dict[str, list[Any]] = {name: [] for name in (*names, "seeds", "top_k")}
    out |= {"temperature": [], "top_p": [], "min_p": [], "query_start_loc": [0]}
    for request in parts:
        for offset, token in enumerate(request.tokens):
            position = request.computed + offset
            out["token_ids"].append(token)
            out["positions"].append(position)
            block = request.blocks[position // BLOCK_SIZE]
            out["slot_mapping"].append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        length = request.computed + len(request.tokens)
        out["seq_lens"].append(length)
        out["query_start_loc"].append(len(out["token_ids"]))
        if request.samples:
            out["logits_rows"].append(len(out["token_ids"]) - 1)
            out["sample_positions"].append(length)
            out["seeds"].append(request.params.seed)
            top_k = request.params.top_k
            assert top_k is not None
            out["top_k"].append(max(top_k, 0) if top_k < VOCAB else 0)
            for name in ("temperature", "top_p", "min_p"):
                out[name].append(torch.tensor(getattr(request.params, name), dtype=torch.float32).item())
    num_tokens = out["query_start_loc"][-1]
    wanted = {
        "token_ids": (padded_tokens, 0),
        "positions": (padded_tokens, 0),
        "slot_mapping": (padded_tokens, -1),
    }
    wanted |= {"seq_lens": (padded_seqs, 0), "query_start_loc": (padded_seqs + 1, num_tokens)}
    for name in ("logits_rows", "sample_positions", "seeds", "top_k", "temperature", "min_p"):
        wanted[name] = padded_samples, 0
    wanted["top_p"] = padded_samples, 1
    for name, (size, value) in wanted.items():
        out[name] += [value] * (size - len(out[name]))
    return out


@st.composite
def steps(draw: Any) -> tuple[Part, ...]:
    requests, room = [], MAX_TOKENS
    for name in draw(st.permutations("abcd"))[: draw(st.integers(0, MAX_SEQS))]:
        count = draw(st.integers(1, min(room, 7)))
        computed = draw(st.integers(0, MAX_BLOCKS * BLOCK_SIZE - count))
        room -= count
        needed = -(-(computed + count) // BLOCK_SIZE)
        num_blocks = draw(st.integers(needed, MAX_BLOCKS))
        requests.append(
            part(
                name,
                draw(st.lists(st.integers(0, VOCAB - 1), min_size=count, max_size=count)),
                computed,
                draw(st.lists(st.integers(1, 9), min_size=num_blocks, max_size=num_blocks, unique=True)),
                source=draw(st.sampled_from([ON_HOST, 0, 1, MAX_SEQS - 1])),
                samples=draw(st.booleans()),
                banned=draw(st.lists(st.integers(0, 2 * VOCAB), max_size=2)),
                temperature=draw(st.sampled_from([0, 0.5, 1.5])),
                top_k=draw(st.sampled_from([-1, 0, 1, VOCAB, 2**31 - 1])),
                top_p=draw(st.sampled_from([0.5, 1])),
                min_p=draw(st.sampled_from([0, 0.1])),
                seed=draw(st.sampled_from([-(2**63), 0, 2**63 - 1])),
            )
        )
    return tuple(requests)


def with_sampled(parts: tuple[Part, ...], sampled: list[int]) -> tuple[Part, ...]:
    """The parts with what their sources hold."""
    return tuple(
        x if x.source == ON_HOST else x._replace(tokens=(*x.tokens[:-1], sampled[x.source])) for x in parts
    )


def leave_samples(batch: InputBatch, sampled: list[int]) -> None:
    """As after a step of as many rows as there can be, each of which has sampled."""
    batch.sampled(MAX_SEQS).copy_(torch.tensor(sampled))
    batch._places = np.arange(MAX_SEQS)


def field(view: Any, name: str) -> Any:
    """A tensor of the view by its name; there is one KV-cache group here."""
    return view.slot_mappings[0] if name == "slot_mapping" else getattr(view, name)


def check(view: Any, parts: tuple[Part, ...], *sizes: int) -> None:
    for name, values in written_one_by_one(parts, *sizes).items():
        assert field(view, name).tolist() == values, name
    for row, request in enumerate(parts):
        assert tuple(view.block_tables[0][row].tolist()[: len(request.blocks)]) == request.blocks
    sampled = [r for r in parts if r.samples]
    counts = [len(r.tokens) for r in parts]
    assert (view.num_tokens, view.num_seqs, view.num_samples) == (sum(counts), len(parts), len(sampled))
    assert view.max_query_len == max(counts, default=0)
    banned = [[i for i in r.banned if i < VOCAB] for r in sampled]
    banned += [[]] * (sizes[2] - len(sampled))
    assert [[i for i in row if i != NO_ID] for row in view.banned.tolist()] == banned


@settings(deadline=None)
@given(
    wanted=st.lists(st.tuples(steps(), st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=5),
    sampled=st.lists(st.integers(0, VOCAB - 1), min_size=MAX_SEQS, max_size=MAX_SEQS),
)
def test_after_any_earlier_steps_a_step_is_written_as_if_token_by_token(
    wanted: list[tuple[tuple[Part, ...], int, int]], sampled: list[int]
) -> None:
    batch, sender = input_batch(), Sender()
    for parts, more_tokens, more_seqs in wanted:
        leave_samples(batch, sampled)
        parts = with_sampled(parts, sampled)
        num_samples = sum(x.samples for x in parts)
        padded_tokens = min(sum(len(x.tokens) for x in parts) + more_tokens, MAX_TOKENS)
        padded_seqs = min(len(parts) + more_seqs, MAX_SEQS)
        sizes = padded_tokens, padded_seqs, min(num_samples + more_seqs, MAX_SEQS)
        check(write(batch, sender.plan(*parts), *sizes), parts, *sizes)


@given(parts=steps())
def test_without_sizes_there_is_no_padding(parts: tuple[Part, ...]) -> None:
    batch = input_batch()
    leave_samples(batch, [0] * MAX_SEQS)
    parts = with_sampled(parts, [0] * MAX_SEQS)
    num_samples = sum(x.samples for x in parts)
    sizes = sum(len(x.tokens) for x in parts), len(parts), num_samples
    check(write(batch, Sender().plan(*parts)), parts, *sizes)


def test_nothing_of_a_full_step_shows_in_the_padding_of_an_empty_one() -> None:
    batch = input_batch()
    full = [
        part(name, [49] * 6, 9, samples=True, temperature=2, top_k=7, top_p=0.1, min_p=0.5) for name in "abcd"
    ]
    write(batch, Sender().plan(*full))
    view = write(batch, no_requests(), MAX_TOKENS, MAX_SEQS, MAX_SEQS)
    check(view, (), MAX_TOKENS, MAX_SEQS, MAX_SEQS)


def test_a_step_finds_its_tokens_in_the_samples_of_the_step_before_whatever_the_host_believes() -> None:
    batch, sender = input_batch(), Sender()
    first = write(batch, sender.plan(part("a", [7, 8]), part("b", [9])))
    first.sampled.copy_(torch.tensor([41, 42]))
    swapped = part("b", [0], 1, source=1), part("a", [0], 2, source=0), part("c", [5])
    view = write(batch, sender.plan(*swapped))
    assert view.token_ids.tolist() == [42, 41, 5]


def test_tensors_never_move_for_the_same_sizes() -> None:
    batch, sender = input_batch(), Sender()
    sizes = 3, 2, 2
    first = write(batch, sender.plan(part()), *sizes)
    second = write(batch, sender.plan(part("b", [3, 4], 2), part("c", [5], 1)), *sizes)
    for name, value in tensors_of(first).items():
        assert tensors_of(second)[name].data_ptr() == value.data_ptr(), name


def test_every_field_starts_where_kernels_may_load_vectors() -> None:
    batch = input_batch()
    for sizes in ((1, 1, 1), (5, 3, 2), (MAX_TOKENS, MAX_SEQS, MAX_SEQS)):
        for name in ("token_ids", "positions", "slot_mapping", "seq_lens", "query_start_loc"):
            assert field(write(batch, no_requests(), *sizes), name).data_ptr() % 16 == 0, name


def tensors_of(view: Any) -> dict[str, torch.Tensor]:
    values = {name: getattr(view, name) for name in view.__dataclass_fields__}
    values |= {"slot_mapping": view.slot_mappings[0], "block_table": view.block_tables[0]}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def test_ids_and_lengths_are_int32_and_noise_counters_int64() -> None:
    view = write(input_batch(), Sender().plan(part()))
    floats, longs = {"temperature", "top_p", "min_p"}, {"seeds", "sample_positions"}
    for name, value in tensors_of(view).items():
        wanted = torch.float32 if name in floats else torch.int64 if name in longs else torch.int32
        assert value.dtype == wanted, name


@pytest.mark.parametrize("tokens, seqs", [(1, 2), (MAX_TOKENS + 1, 2), (4, 1), (4, MAX_SEQS + 1)])
def test_sizes_that_do_not_hold_the_step_or_do_not_fit_are_refused(tokens: int, seqs: int) -> None:
    plan = Sender().plan(part("a", [1, 2]), part("b", [3]))
    with pytest.raises(AssertionError):
        input_batch().write(plan, tokens, seqs)


def test_sampling_parameters_are_sent_only_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, sender = input_batch(), Sender()
    sent = []
    original = batch._send
    monkeypatch.setattr(batch, "_send", lambda values: (sent.append(values.shape), original(values))[1])
    one, other = part(temperature=0.5, blocks=[1]), part(temperature=0.25, blocks=[1])
    counts = []
    for request in (one, one, other, one):
        before = len(sent)
        write(batch, sender.plan(request))
        counts.append(len(sent) - before)
    assert counts == [3, 0, 1, 1]  # at first the table's entry and that nothing is banned, too


def test_more_banned_ids_than_the_input_batch_holds_come_in_a_tensor_of_their_own() -> None:
    batch = input_batch()
    few, many = part(banned=range(MAX_BANNED)), part(banned=range(MAX_BANNED + 1))
    held = write(batch, Sender().plan(few)).banned
    view = write(batch, Sender().plan(many))
    check(view, (many,), 1, 1, 1)
    assert view.banned.data_ptr() != held.data_ptr()
    assert write(batch, Sender().plan(part())).banned.tolist() == [[NO_ID] * MAX_BANNED]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_the_device_holds_what_was_written() -> None:
    batch, sender = input_batch("cuda"), Sender()
    for tokens in ([7, 8, 9], [1]):
        parts = part("a", tokens, 1, temperature=0.5), part("b", [2], 4, samples=False)
        view = write(batch, sender.plan(*parts), 9, 3, 2)
        assert view.token_ids.is_cuda
        check(view, parts, 9, 3, 2)
