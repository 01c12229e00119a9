"""Straight-line calls over named values: bound to checked weights, holding nothing longer than it is read."""

import dataclasses
import weakref

import pytest
import torch

from lamina.common.errors import ShapeError
from lamina.compiler.capture.capture import NUM_TOKENS, POSITIONS, TOKEN_IDS
from lamina.compiler.codegen.inductor import Artifact, Piece
from lamina.compiler.execution.cuda_graphs import CudaGraphs
from lamina.compiler.execution.message import TokenValue
from lamina.compiler.execution.plan import Plan, Step
from lamina.compiler.numerics import MAX_NUM_TOKENS

CPU = torch.device("cpu")
PARAMETERS = {"w": ((4,), torch.float32)}


def piece(call):
    artifact = Artifact(
        key="",
        source="",
        kernels={},
        launches={},
        graph_before="",
        stages=(),
        origins="",
        reports=(),
        gemms=(),
        device="cpu",
        is_checked=True,
        seconds=0.0,
    )
    return Piece(artifact=artifact, call=call, was_compiled=False)


def spread(arguments):
    """[T] ids and [4] weights to three values [T, 4], the last an output buffer."""
    ids, weight = arguments
    arguments.clear()
    x = ids[:, None] * weight
    return x, x + 1, torch.zeros_like(x)


def combine(arguments):
    x, out, positions, num_tokens = arguments
    arguments.clear()
    return (x + out + positions[:, None] * num_tokens,)


def make_plan(first=spread, last=combine):
    steps = (
        Step(piece=0, layer=None, inputs=(TOKEN_IDS, "w"), outputs=("x", "y", "out")),
        Step(piece=None, layer=3, inputs=("x", "y", "y", "out"), outputs=()),
        Step(piece=1, layer=None, inputs=("x", "out", POSITIONS, NUM_TOKENS), outputs=("z",)),
    )
    return Plan(steps=steps, pieces=(piece(first), piece(last)), parameters=PARAMETERS, result="z")


def attend(layer, query, key, value, out):
    assert layer == 3
    out.copy_(query + key)


def tokens(num_tokens):
    return torch.arange(num_tokens, dtype=torch.int32), torch.arange(num_tokens, dtype=torch.int32)


def test_pieces_and_attention_are_called_in_order_on_named_values():
    bound = make_plan().bind({"w": torch.ones(4)}, CPU)
    for num_tokens in (1, 3):
        ids, positions = tokens(num_tokens)
        expected = (3 * ids + 1 + positions * num_tokens)[:, None].expand(num_tokens, 4)
        assert torch.equal(bound(ids, positions, attend), expected.float())


def test_each_piece_can_be_run_by_another():
    called = []

    def run_piece(call, arguments):
        called.append(call)
        return call(arguments)

    bound = make_plan().bind({"w": torch.ones(4)}, CPU)
    assert torch.equal(bound(*tokens(3), attend, run_piece), bound(*tokens(3), attend))
    assert called == [spread, combine]


def with_values(plan, *names):
    return dataclasses.replace(plan, values={name: TokenValue((4,), torch.float32) for name in names})


def last_by_token(arguments):
    x, out, positions = arguments
    arguments.clear()
    return (x + out * positions[:, None],)


def plan_by_token(*known):
    *steps, last = make_plan().steps
    steps.append(dataclasses.replace(last, inputs=("x", "out", POSITIONS)))
    return with_values(dataclasses.replace(make_plan(last=last_by_token), steps=tuple(steps)), *known)


@pytest.mark.parametrize("rows", [[0], [4], [3, 1], [0, 1, 2, 3, 4]])
def test_of_rows_that_are_asked_for_the_last_piece_computes_no_others(rows):
    bound = plan_by_token("x", "y", "out").bind({"w": torch.ones(4)}, CPU)
    assert bound.can_take_rows
    wanted = torch.tensor(rows, dtype=torch.int32)
    every = bound(*tokens(5), attend)
    assert torch.equal(bound(*tokens(5), attend, rows=wanted), every[wanted])
    graphs, given, sizes = CudaGraphs(CPU), tokens(5), {"num_tokens": 5, "num_padded": 0}
    graphs.capture_pieces("five", bound, *given, attend)
    assert torch.equal(graphs.replay("five", given, rows=wanted, **sizes), every[wanted])
    assert torch.equal(graphs.replay("five", given, **sizes), every)


def test_a_plan_whose_last_piece_reads_what_may_have_no_rows_takes_none():
    assert not plan_by_token("x", "y").bind({"w": torch.ones(4)}, CPU).can_take_rows, "out is unknown"
    staged = dataclasses.replace(plan_by_token("x", "y", "out", "z"), gives=("z",))
    assert not staged.bind({"w": torch.ones(4)}, CPU).can_take_rows, "the next stage has attention"


def test_a_value_is_given_up_after_its_last_reader():
    alive = {}

    def watched_spread(arguments):
        results = spread(arguments)
        alive.update(zip(("x", "y", "out"), map(weakref.ref, results), strict=True))
        return results

    def watched_combine(arguments):
        assert alive["y"]() is None  # attention was its last reader
        results = combine(arguments)
        assert alive["x"]() is None
        return results

    bound = make_plan(watched_spread, watched_combine).bind({"w": torch.ones(4)}, CPU)
    result = bound(*tokens(3), attend)
    assert all(reference() is None for reference in alive.values())
    assert result.shape == (3, 4)


def test_weights_outlive_a_call_and_inputs_do_not():
    weight = torch.ones(4)
    bound = make_plan().bind({"w": weight}, CPU)
    ids, positions = tokens(3)
    watched = weakref.ref(ids)
    bound(ids, positions, attend)
    del ids
    assert watched() is None
    assert torch.equal(bound(*tokens(3), attend), bound(*tokens(3), attend))


@pytest.mark.parametrize(
    "weight, message",
    [
        (None, r"weight w is missing; the plan wants \[4\] torch.float32"),
        (torch.ones(5), r"weight w is \[5\] torch.float32 on cpu; the plan wants \[4\]"),
        (torch.ones(2, 2), r"weight w is \[2, 2\]"),
        (torch.ones(4, dtype=torch.float64), r"weight w is \[4\] torch.float64 .* wants \[4\] torch.float32"),
        (torch.ones(4, device="meta"), r"on meta; the plan wants \[4\] torch.float32 on cpu"),
        (torch.ones(8)[::2], r"weight w must be contiguous and aligned to 16 bytes"),
        (torch.ones(5)[1:], r"weight w must be contiguous and aligned to 16 bytes"),
    ],
    ids=["missing", "longer", "square", "double", "meta", "strided", "unaligned"],
)
def test_a_weight_that_the_trace_did_not_assume_is_refused(weight, message):
    with pytest.raises(ShapeError, match=message):
        make_plan().bind({} if weight is None else {"w": weight}, CPU)


def test_other_weights_are_ignored():
    make_plan().bind({"w": torch.ones(4), "lm_head": torch.ones(2, 2)}, CPU)


@pytest.mark.parametrize("num_ids, num_positions", [(0, 0), (3, 2), (2, 3), (MAX_NUM_TOKENS + 1,) * 2])
def test_a_number_of_tokens_outside_the_traced_range_is_refused(num_ids, num_positions):
    bound = make_plan().bind({"w": torch.ones(4)}, CPU)
    with pytest.raises(ShapeError, match=rf"\[{num_ids}\] token ids, \[{num_positions}\] positions; wanted"):
        bound(tokens(num_ids)[0], tokens(num_positions)[1], attend)
