"""The pass that joins dense projections with gates, broken on purpose: a check finds each fault."""

import pytest
import torch

from lamina.compiler.passes import linear_silu_and_mul as joining
from lamina.custom_ops.gelu_and_mul.reference import gelu_and_mul
from lamina.custom_ops.linear.reference import linear
from lamina.custom_ops.silu_and_mul.reference import silu_and_mul

from ..mutants import assert_caught, census, form, is_caught, memory, values, with_op
from ..pipelines import LINEAR_SILU_AND_MUL

OP = torch.ops.lamina.linear_silu_and_mul.default
KINDS = ("mlp", "written_mlp", "add_norm_biased_mlp")


def gate_and_up_are_swapped(*given):
    gate, up = linear(*given).chunk(2, dim=1)
    return silu_and_mul(torch.cat((up, gate), dim=1))


def every_gate_is_a_gelu(*given):
    return gelu_and_mul(linear(*given))


def projection_is_not_rounded_before(x, weight, bias=None):
    wide = [None if one is None else one.double() for one in (x, weight, bias)]
    return silu_and_mul(linear(*wide)).to(x.dtype)


def bias_is_dropped(*given):
    return silu_and_mul(linear(*given[:2]))


@pytest.mark.parametrize(
    "wrong",
    [gate_and_up_are_swapped, every_gate_is_a_gelu, projection_is_not_rounded_before, bias_is_dropped],
)
def test_a_wrong_formula_is_caught_by_its_values(wrong):
    assert_caught(with_op(LINEAR_SILU_AND_MUL, OP, wrong), values, KINDS)


def test_the_right_pass_is_not_caught():
    for check in (values, memory, form, census):
        assert not is_caught(LINEAR_SILU_AND_MUL, check, KINDS, max_examples=5)


def test_a_projection_that_others_read_is_left_alone():
    assert not is_caught(LINEAR_SILU_AND_MUL, census, ("add_norm_mlp_with_gemm_kept",), max_examples=5)


def test_an_argument_lost_on_the_way_is_caught(monkeypatch):
    emit = joining.emit
    monkeypatch.setattr(joining, "emit", lambda graph, node, op, *given: emit(graph, node, op, *given[:2]))
    assert_caught(LINEAR_SILU_AND_MUL, values, KINDS)
