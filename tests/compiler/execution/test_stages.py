"""A plan cut into stages: run one after the other, with messages between, they compute what it computes."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import CompileError
from lamina.compiler.compile import Program
from lamina.compiler.execution.message import failure_of
from lamina.compiler.execution.plan import Plan
from lamina.compiler.execution.stages import stage_of
from lamina.compiler.uncompiled import uncompiled_plan

LAYERS, HIDDEN, ROWS = 4, 6, 11
TABLE = {"table": ((ROWS, HIDDEN), torch.float64), "angles": ((50, 3), torch.float32)}
TABLE |= {f"w{layer}": ((HIDDEN, HIDDEN), torch.float64) for layer in range(LAYERS)}


def forward(weights: Mapping[str, Tensor], token_ids: Tensor, positions: Tensor, attend: Any) -> Tensor:
    """Layers that read a sum, and angles of another dtype whose rows are no multiple of the alignment."""
    total, angles = weights["table"][token_ids], weights["angles"][positions]
    for layer in range(LAYERS):
        x = total @ weights[f"w{layer}"]
        out = torch.empty_like(x)
        attend(layer, x, x + angles.repeat(1, 2), x, out)
        total = total + torch.tanh(out)
    return total * 2


def backwards(weights: Mapping[str, Tensor], token_ids: Tensor, positions: Tensor, attend: Any) -> Tensor:
    """Layers in another order than their numbers."""
    x = weights["table"][token_ids]
    for layer in (1, 0):
        out = torch.empty_like(x)
        attend(layer, x, x, x, out)
        x = x + out
    return x


def plan_of(function: Any) -> Plan:
    return uncompiled_plan(Program(forward=function, parameters=TABLE, device=torch.device("cpu")))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(forward)


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Any function of all that there is."""
    out.copy_(q.cumsum(0) + (layer + 1) * k - 0.5 * v)


def run(plan: Plan, inputs: Sequence[Tensor], weights: Mapping[str, Tensor], ranges: Sequence[range]) -> Any:
    """What the last stage returns, each with a message of its own that the one before has filled."""
    message = None
    for layers in ranges:
        stage = stage_of(plan, layers)
        own = {name: weights[name] for name in stage.parameters}
        message = stage.bind(own, torch.device("cpu"), message)(*inputs, attend)
    return message


@given(
    cuts=st.sets(st.integers(1, LAYERS - 1)),
    ids=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=9),
    seed=st.integers(0, 3),
)
def test_stages_compute_what_the_whole_plan_does(
    plan: Plan, cuts: set[int], ids: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(shape, generator=generator, dtype=kind) for name, (shape, kind) in TABLE.items()
    }
    inputs = torch.tensor(ids, dtype=torch.int32), torch.arange(len(ids), dtype=torch.int32)
    whole = plan.bind(weights, torch.device("cpu"))(*inputs, attend)
    assert torch.equal(whole, forward(weights, *inputs, attend))
    ranges = [range(*pair) for pair in itertools.pairwise((0, *sorted(cuts), LAYERS))]
    assert torch.equal(run(plan, inputs, weights, ranges), whole)


def test_a_stage_needs_its_own_weights_alone_and_hands_failures_on(plan: Plan) -> None:
    first, middle, last = (stage_of(plan, layers) for layers in (range(2), range(2, 3), range(3, 4)))
    assert set(first.parameters) == {"table", "angles", "w0", "w1"}
    assert set(middle.parameters) == {"w2"}
    assert set(last.parameters) == {"w3"}
    assert first.takes == last.gives == ()
    assert first.gives == middle.takes
    message = torch.zeros(middle.layout(middle.takes).num_bytes(3), dtype=torch.uint8)
    failure_of(message).fill_(1)
    inputs = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    weights = {"w2": torch.ones(HIDDEN, HIDDEN, dtype=torch.float64)}
    assert failure_of(middle.bind(weights, torch.device("cpu"), message)(*inputs, attend)).item() == 1


def test_layers_out_of_order_are_refused() -> None:
    with pytest.raises(CompileError, match=r"calls its layers in the order \(1, 0\); wanted ascending"):
        stage_of(plan_of(backwards), range(1))
