"""The arena against a writer that takes one token at a time, from whatever state earlier steps left it in."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.runtime.input_batch import InputBatch
from lamina.runtime.request import SamplingParams
from lamina.runtime.scheduler import ScheduledRequest, SchedulerOutput

BLOCK_SIZE, MAX_BLOCKS, MAX_SEQS, MAX_TOKENS, VOCAB = 3, 5, 4, 24, 50


def arena(device="cpu"):
    return InputBatch(
        max_num_seqs=MAX_SEQS,
        max_num_tokens=MAX_TOKENS,
        max_blocks_per_seq=MAX_BLOCKS,
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB,
        device=torch.device(device),
    )


def scheduled(name="a", tokens=(1,), computed=0, blocks=(1, 2, 3, 4, 5), samples=True, banned=(), **params):
    params = SamplingParams(**params).resolve(None, seed=0)
    return ScheduledRequest(name, tuple(tokens), computed, tuple(blocks), samples, params, tuple(banned))


def plan_of(*requests):
    return SchedulerOutput(step=1, requests=requests, num_tokens=sum(len(r.token_ids) for r in requests))


def written_one_by_one(plan, padded_tokens, padded_seqs):
    """Every field as the docstrings define it, in plain lists."""
    out = {name: [] for name in ("token_ids", "positions", "slot_mapping", "block_tables", "seq_lens")}
    rows = {
        name: []
        for name in ("logits_rows", "temperature", "top_k", "top_p", "min_p", "seeds", "sample_positions")
    }
    out["query_start_loc"] = [0]
    for request in plan.requests:
        for offset, token in enumerate(request.token_ids):
            position = request.num_computed_tokens + offset
            out["token_ids"].append(token)
            out["positions"].append(position)
            block = request.block_ids[position // BLOCK_SIZE]
            out["slot_mapping"].append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        length = request.num_computed_tokens + len(request.token_ids)
        out["seq_lens"].append(length)
        out["query_start_loc"].append(len(out["token_ids"]))
        out["block_tables"].append([*request.block_ids, *[0] * (MAX_BLOCKS - len(request.block_ids))])
        if request.samples:
            rows["logits_rows"].append(len(out["token_ids"]) - 1)
            rows["sample_positions"].append(length)
            rows["seeds"].append(request.params.seed)
            rows["top_k"].append(max(request.params.top_k, 0) if request.params.top_k < VOCAB else 0)
            for name in ("temperature", "top_p", "min_p"):
                rows[name].append(torch.tensor(getattr(request.params, name)).item())
    padding = padded_tokens - plan.num_tokens
    for name, value in (("token_ids", 0), ("positions", 0), ("slot_mapping", -1)):
        out[name] += [value] * padding
    padding = padded_seqs - len(plan.requests)
    out["seq_lens"] += [0] * padding
    out["query_start_loc"] += [plan.num_tokens] * padding
    out["block_tables"] += [[0] * MAX_BLOCKS] * padding
    return out | rows


@st.composite
def plans(draw):
    requests, room = [], MAX_TOKENS
    for name in draw(st.permutations("abcd"))[: draw(st.integers(0, MAX_SEQS))]:
        count = draw(st.integers(1, min(room, 7)))
        computed = draw(st.integers(0, MAX_BLOCKS * BLOCK_SIZE - count))
        room -= count
        needed = -(-(computed + count) // BLOCK_SIZE)
        num_blocks = draw(st.integers(needed, MAX_BLOCKS))
        requests.append(
            scheduled(
                name,
                draw(st.lists(st.integers(0, VOCAB - 1), min_size=count, max_size=count)),
                computed,
                draw(st.lists(st.integers(1, 9), min_size=num_blocks, max_size=num_blocks, unique=True)),
                samples=draw(st.booleans()),
                banned=draw(st.lists(st.integers(0, 2 * VOCAB), max_size=2)),
                temperature=draw(st.sampled_from([0, 0.5, 1.5])),
                top_k=draw(st.sampled_from([-1, 0, 1, VOCAB, 10**12])),
                top_p=draw(st.sampled_from([0.5, 1])),
                min_p=draw(st.sampled_from([0, 0.1])),
                seed=draw(st.sampled_from([-(2**63), 0, 2**63 - 1])),
            )
        )
    return plan_of(*requests)


def check(view, plan, padded_tokens, padded_seqs):
    for name, values in written_one_by_one(plan, padded_tokens, padded_seqs).items():
        assert getattr(view, name).tolist() == values, name
    sampled = [r for r in plan.requests if r.samples]
    assert (view.num_tokens, view.num_seqs, view.num_samples) == (
        plan.num_tokens,
        len(plan.requests),
        len(sampled),
    )
    assert view.max_query_len == max((len(r.token_ids) for r in plan.requests), default=0)
    banned = {row: [i for i in r.banned_token_ids if i < VOCAB] for row, r in enumerate(sampled)}
    assert {row: list(ids) for row, ids in view.banned} == {row: ids for row, ids in banned.items() if ids}
    random = [r.params for r in sampled if r.params.temperature > 0]
    filtered = [p for p in random if 0 < p.top_k < VOCAB or p.top_p < 1 or p.min_p > 0]
    assert (view.any_random, view.any_filter) == (bool(random), bool(filtered))


@settings(deadline=None)
@given(steps=st.lists(st.tuples(plans(), st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=5))
def test_after_any_earlier_steps_a_step_is_written_as_if_token_by_token(steps):
    batch = arena()
    for plan, more_tokens, more_seqs in steps:
        padded_tokens = min(plan.num_tokens + more_tokens, MAX_TOKENS)
        padded_seqs = min(len(plan.requests) + more_seqs, MAX_SEQS)
        check(batch.write(plan, padded_tokens, padded_seqs), plan, padded_tokens, padded_seqs)


@given(plan=plans())
def test_without_sizes_there_is_no_padding(plan):
    check(arena().write(plan), plan, plan.num_tokens, len(plan.requests))


def test_nothing_of_a_full_step_shows_in_the_padding_of_an_empty_one():
    batch = arena()
    full = [
        scheduled(name, [49] * 6, 9, samples=True, temperature=2, top_k=7, top_p=0.1, min_p=0.5)
        for name in "abcd"
    ]
    batch.write(plan_of(*full))
    view = batch.write(plan_of(), MAX_TOKENS, MAX_SEQS)
    check(view, plan_of(), MAX_TOKENS, MAX_SEQS)
    beyond = view.temperature.as_strided((MAX_SEQS,), (1,)), view.logits_rows.as_strided((MAX_SEQS,), (1,))
    assert all(not rows.any() for rows in beyond), "a captured graph samples padding rows too"


def test_tensors_never_move():
    batch = arena()
    first = batch.write(plan_of(scheduled()))
    second = batch.write(plan_of(scheduled("b", [3, 4], 2), scheduled("c", [5], 1)))
    for name, value in vars_of(first).items():
        assert vars_of(second)[name].data_ptr() == value.data_ptr(), name


def vars_of(view):
    names = view.__dataclass_fields__
    return {name: getattr(view, name) for name in names if isinstance(getattr(view, name), torch.Tensor)}


def test_ids_and_lengths_are_int32_and_noise_counters_int64():
    dtypes = {name: value.dtype for name, value in vars_of(arena().write(plan_of(scheduled()))).items()}
    floats, longs = {"temperature", "top_p", "min_p"}, {"seeds", "sample_positions"}
    for name, dtype in dtypes.items():
        assert dtype == (
            torch.float32 if name in floats else torch.int64 if name in longs else torch.int32
        ), name


@pytest.mark.parametrize("tokens, seqs", [(1, 2), (MAX_TOKENS + 1, 2), (4, 1), (4, MAX_SEQS + 1)])
def test_sizes_that_do_not_hold_the_step_or_do_not_fit_the_arena_are_refused(tokens, seqs):
    plan = plan_of(scheduled("a", [1, 2]), scheduled("b", [3]))
    with pytest.raises(AssertionError):
        arena().write(plan, tokens, seqs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_the_device_holds_what_was_written():
    batch = arena("cuda")
    for tokens in ([7, 8, 9], [1]):
        plan = plan_of(scheduled("a", tokens, 1, temperature=0.5), scheduled("b", [2], 4, samples=False))
        view = batch.write(plan, 9, 3)
        assert view.token_ids.is_cuda
        check(view, plan, 9, 3)
