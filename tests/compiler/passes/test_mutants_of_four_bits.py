"""The pass that joins projections in four bits with gates, broken on purpose: a check finds each fault."""

import pytest
import torch

from lamina.compiler.passes import gated_w4a16
from lamina.custom_ops.gelu_and_mul.reference import gelu_and_mul
from lamina.custom_ops.silu_and_mul.reference import silu_and_mul
from lamina.testing.checks import linear_w4a16

from ..mutants import assert_caught, census, forgetting, form, is_caught, memory, values, with_op
from ..pipelines import GATED_W4A16

OP = torch.ops.lamina.linear_w4a16.default
KINDS = ("mlp_w4a16", "norm_mlp_w4a16")


def plain(given):
    """The projection without its gate."""
    return linear_w4a16(*given[:7])


def gate_and_up_are_swapped(*given):
    gate, up = plain(given).chunk(2, dim=1)
    return silu_and_mul(torch.cat((up, gate), dim=1)) if True in given[7:] else plain(given)


def every_gate_is_a_gelu(*given):
    return gelu_and_mul(plain(given)) if True in given[7:] else plain(given)


def projection_is_not_rounded_before(*given):
    x, weight, scale, zero, bias, group, shuffled, *gated = (*given, False, False)[:8]
    wide = [None if one is None else one.double() for one in (scale, zero, bias)]
    out = linear_w4a16(x.double(), weight, *wide, group, shuffled)
    return (silu_and_mul(out) if True in gated else out).to(x.dtype)


def bias_is_dropped(*given):
    return linear_w4a16(*given[:4], None, *given[5:])


def zero_is_dropped(*given):
    return linear_w4a16(*given[:3], None, *given[4:])


WRONG = (
    *(gate_and_up_are_swapped, every_gate_is_a_gelu, projection_is_not_rounded_before),
    *(bias_is_dropped, zero_is_dropped),
)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_formula_is_caught_by_its_values(wrong):
    assert_caught(with_op(GATED_W4A16, OP, wrong), values, KINDS)


def test_the_right_pass_is_not_caught():
    for check in (values, memory, form, census):
        assert not is_caught(GATED_W4A16, check, KINDS, max_examples=5)


def test_a_precondition_left_out_is_caught(monkeypatch):
    obstacle = forgetting(gated_w4a16._obstacle, "others read")
    monkeypatch.setattr(gated_w4a16, "_obstacle", obstacle)
    assert_caught(GATED_W4A16, census, ("mlp_w4a16_with_projection_kept",))


def test_an_argument_lost_on_the_way_is_caught(monkeypatch):
    emit = gated_w4a16.emit
    monkeypatch.setattr(
        gated_w4a16,
        "emit",
        lambda graph, node, op, *given: emit(graph, node, op, *given[:4], None, *given[5:]),
    )
    assert_caught(GATED_W4A16, values, KINDS)


def test_a_gate_left_out_is_caught(monkeypatch):
    emit = gated_w4a16.emit
    monkeypatch.setattr(
        gated_w4a16, "emit", lambda graph, node, op, *given: emit(graph, node, op, *given[:-1], False)
    )
    assert_caught(GATED_W4A16, form, KINDS)
