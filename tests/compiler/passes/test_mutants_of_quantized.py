"""The passes that quantize where activations are made, broken on purpose; every fault must be caught."""

import operator

import pytest
import torch

from lamina.compiler.passes import quantized
from lamina.custom_ops._shared.fp8 import FP8
from lamina.custom_ops.act_and_mul_quantized.reference import act_and_mul_quantized
from lamina.custom_ops.add_rms_norm.reference import add_rms_norm
from lamina.custom_ops.add_rms_norm_quantized.reference import add_rms_norm_quantized
from lamina.custom_ops.quantize_rows.reference import quantize_rows
from lamina.custom_ops.rms_norm_quantized.reference import rms_norm_quantized

from ..mutants import assert_caught, census, forgetting, form, is_caught, memory, values, with_op
from ..pipelines import GATE_QUANTIZED, NORM_QUANTIZED

OPS = torch.ops.lamina
SUM, NORM = OPS.add_rms_norm_quantized.default, OPS.rms_norm_quantized.default
GATE, LINEAR = OPS.act_and_mul_quantized.default, OPS.scaled_linear.default
NORMS = ("norm_linear_w8a8", "zero_norm_linear_w8a8")
SUMS = ("add_norm_linear_w8a8", "unrounded_norm_linear_w8a8")
GATES = ("mlp_w8a8", "gelu_mlp_w8a8")


def sum_is_not_handed_on(x, residual, weight, eps, group, dtype, zero_centred, unrounded):
    *both, _ = add_rms_norm_quantized(x, residual, weight, eps, group, dtype, zero_centred, unrounded)
    return *both, residual


def sum_is_always_rounded(x, residual, weight, eps, group, dtype, zero_centred, unrounded):
    return add_rms_norm_quantized(x, residual, weight, eps, group, dtype, zero_centred, False)


def norm_is_left_out(x, residual, weight, eps, group, dtype, zero_centred, unrounded):
    _, total = add_rms_norm(x, residual, weight, eps)
    return *quantize_rows(total, group, dtype), total


def weight_is_never_zero_centred(x, weight, eps, group, dtype, zero_centred):
    return rms_norm_quantized(x, weight, eps, group, dtype)


def norm_is_not_rounded_before(x, weight, eps, group, dtype, zero_centred):
    values, _ = rms_norm_quantized(x.float(), weight.float(), eps, group, dtype, zero_centred)
    _, scale = rms_norm_quantized(x, weight, eps, group, dtype, zero_centred)
    return values, scale * 1.001


def every_gate_is_a_silu(gate_up, gelu, group, dtype):
    return act_and_mul_quantized(gate_up, False, group, dtype)


def gate_and_up_are_swapped(gate_up, gelu, group, dtype):
    gate, up = gate_up.chunk(2, dim=1)
    return act_and_mul_quantized(torch.cat((up, gate), dim=1), gelu, group, dtype)


def bias_is_dropped(x, x_scale, weight, scale, bias, dtype):
    return LINEAR(x, x_scale, weight, scale, None, dtype)


def scale_of_x_is_forgotten(x, x_scale, weight, scale, bias, dtype):
    return LINEAR(x, torch.ones_like(x_scale), weight, scale, bias, dtype)


WRONG = [
    *((NORM_QUANTIZED, SUM, wrong, SUMS) for wrong in (sum_is_not_handed_on, sum_is_always_rounded)),
    (NORM_QUANTIZED, SUM, norm_is_left_out, SUMS),
    *(
        (NORM_QUANTIZED, NORM, wrong, NORMS)
        for wrong in (weight_is_never_zero_centred, norm_is_not_rounded_before)
    ),
    *((GATE_QUANTIZED, GATE, wrong, GATES) for wrong in (every_gate_is_a_silu, gate_and_up_are_swapped)),
    *((GATE_QUANTIZED, LINEAR, wrong, GATES) for wrong in (bias_is_dropped, scale_of_x_is_forgotten)),
]


@pytest.mark.parametrize("step, op, wrong, kinds", WRONG, ids=[wrong.__name__ for _, _, wrong, _ in WRONG])
def test_a_wrong_formula_is_caught_by_its_values(step, op, wrong, kinds):
    assert_caught(with_op(step, op, wrong), values, kinds)


@pytest.mark.parametrize(
    "step, kinds", [(NORM_QUANTIZED, (*NORMS, *SUMS)), (GATE_QUANTIZED, GATES)], ids=["norm", "gate"]
)
def test_the_right_pass_is_not_caught(step, kinds):
    for check in (values, memory, form, census):
        assert not is_caught(step, check, kinds, max_examples=5)


@pytest.mark.parametrize(
    "step, reason, kind",
    [
        (NORM_QUANTIZED, "needs it as it is", "norm_linear_w8a8_with_norm_kept"),
        (NORM_QUANTIZED, "in more than one format", "norm_read_in_two_formats"),
        (GATE_QUANTIZED, "needs it as it is", "mlp_w8a8_with_gate_kept"),
    ],
)
def test_a_precondition_left_out_is_caught(monkeypatch, step, reason, kind):
    monkeypatch.setattr(quantized, "_obstacle", forgetting(quantized._obstacle, reason))
    assert_caught(step, census, (kind,))


def test_scales_of_rows_in_place_of_groups_are_caught(monkeypatch):
    monkeypatch.setattr(quantized, "_format", lambda gemm: (0, FP8))
    assert_caught(NORM_QUANTIZED, form, ("zero_norm_linear_w8a8", "norm_read_in_two_formats"))


def test_values_taken_for_scales_are_caught(monkeypatch):
    def swapped(graph, node, target, *args):
        if target is operator.getitem and args[1] in (0, 1):
            args = (args[0], 1 - args[1])
        return emit(graph, node, target, *args)

    emit = quantized.emit
    monkeypatch.setattr(quantized, "emit", swapped)
    assert_caught(NORM_QUANTIZED, form, NORMS)
