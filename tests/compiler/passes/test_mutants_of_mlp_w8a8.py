"""The pass that joins an MLP in one byte, broken on purpose; every fault must be caught."""

import pytest
import torch

from lamina.compiler.passes import mlp_w8a8
from lamina.testing import checks

from ..mutants import assert_caught, census, forgetting, form, is_caught, memory, values, with_op
from ..pipelines import MLP_W8A8

OP = torch.ops.lamina.mlp_w8a8.default
KINDS = ("norm_mlp_w8a8", "norm_mlp_w8a8_in_int8")


def gate_and_up_are_swapped(x, x_scale, gate_up, scale, bias, *rest):
    swapped = [part if part is None else part.roll(len(part) // 2, 0) for part in (gate_up, scale, bias)]
    return checks.mlp_w8a8(x, x_scale, *swapped, *rest)


def bias_of_gate_is_dropped(x, x_scale, gate_up, scale, bias, *rest):
    return checks.mlp_w8a8(x, x_scale, gate_up, scale, None, *rest)


def bias_of_down_is_dropped(*given):
    *first, _, dtype = given
    return checks.mlp_w8a8(*first, None, dtype)


def scale_of_x_is_forgotten(x, x_scale, *rest):
    return checks.mlp_w8a8(x, torch.ones_like(x_scale), *rest)


WRONG = [gate_and_up_are_swapped, bias_of_gate_is_dropped, bias_of_down_is_dropped, scale_of_x_is_forgotten]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_formula_is_caught_by_its_values(wrong):
    assert_caught(with_op(MLP_W8A8, OP, wrong), values, KINDS)


def test_the_right_pass_is_not_caught():
    for check in (values, memory, form, census):
        assert not is_caught(MLP_W8A8, check, KINDS, max_examples=5)


@pytest.mark.parametrize(
    "reason, kind",
    [
        ("others read the projection", "norm_mlp_w8a8_with_projection_kept"),
        ("in more than one format", "norm_mlp_w8a8_in_two_formats"),
    ],
)
def test_a_precondition_left_out_is_caught(monkeypatch, reason, kind):
    monkeypatch.setattr(mlp_w8a8, "_obstacle", forgetting(mlp_w8a8._obstacle, reason))
    assert_caught(MLP_W8A8, census, (kind,))


def test_a_gate_of_another_kind_is_none_of_its_sites(monkeypatch):
    monkeypatch.setattr(mlp_w8a8, "SILU", True)
    assert_caught(MLP_W8A8, census, ("norm_mlp_w8a8_with_gelu",))


def test_a_projection_taken_for_one_of_two_is_caught(monkeypatch):
    def first_of(gate):
        return next(reader for item in gate.users for reader in item.users)

    monkeypatch.setattr(mlp_w8a8, "_reader", first_of)
    assert_caught(MLP_W8A8, census, ("norm_mlp_w8a8_with_two_behind",))
