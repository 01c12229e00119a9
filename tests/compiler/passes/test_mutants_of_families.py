"""Passes broken on purpose, as in test_mutants.py: what families other than LLaMA need of them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lamina.compiler.passes import add_rms_norm, qk_norm, silu_and_mul
from lamina.compiler.passes.add_rms_norm import ADD_RMS_NORM, RMS_NORM
from lamina.compiler.passes.match import Any_, Call
from lamina.compiler.passes.silu_and_mul import GELU_AND_MUL
from lamina.custom_ops.add_rms_norm.reference import add_rms_norm as plain_sum_norm
from lamina.custom_ops.add_zero_centred_rms_norm.reference import add_zero_centred_rms_norm as sum_norm
from lamina.custom_ops.qk_norm.reference import qk_norm as norm_heads
from lamina.custom_ops.rms_norm.reference import rms_norm
from lamina.custom_ops.zero_centred_rms_norm.reference import zero_centred_rms_norm as norm

from ..mutants import assert_caught, census, forgetting, form, is_caught, memory, values, with_op
from ..pipelines import QK_NORM

OPS = torch.ops.lamina
NORM, SUM_NORM = OPS.zero_centred_rms_norm.default, OPS.add_zero_centred_rms_norm.default
PLAIN_SUM_NORM, HEADS, GELU = OPS.add_rms_norm.default, OPS.qk_norm.default, OPS.gelu_and_mul.default
KINDS = {
    NORM: ("zero_norm", "written_zero_norm"),
    SUM_NORM: ("add_zero_norm", "add_zero_norm_unrounded", "zero_norm_of_kept_sum"),
    PLAIN_SUM_NORM: ("add_norm_unrounded", "add_norm"),
    HEADS: ("head_norms", "zero_centred_head_norms"),
    GELU: ("gelu_mlp", "written_gelu_mlp"),
}
STEPS = {
    NORM: RMS_NORM,
    SUM_NORM: ADD_RMS_NORM,
    PLAIN_SUM_NORM: ADD_RMS_NORM,
    HEADS: QK_NORM,
    GELU: GELU_AND_MUL,
}


def weight_is_not_shifted(x, weight, eps):
    return norm(x, weight - 1, eps)


def factor_is_rounded(x, weight, eps):
    return (norm(x.double(), (1 + weight).double() - 1, eps)).to(x.dtype)


def unit_is_rounded(x, weight, eps):
    return (rms_norm(x, torch.ones_like(weight), eps) * (1.0 + weight.double())).to(x.dtype)


def eps_of_the_norm_is_a_constant(x, weight, eps):
    return norm(x, weight, 1e-6)


def sum_is_rounded_never_or_always(x, residual, weight, eps, unrounded=False):
    return sum_norm(x, residual, weight, eps, not unrounded)


def plain_sum_is_always_rounded(x, residual, weight, eps, unrounded=False):
    return plain_sum_norm(x, residual, weight, eps)


def unsummed_residual_is_returned(x, residual, weight, eps, unrounded=False):
    return sum_norm(x, residual, weight, eps, unrounded)[0], residual


def sum_of_a_norm_is_dropped(x, residual, weight, eps, unrounded=False):
    return norm(x, weight, eps), x + residual


def weights_are_swapped(query, key, query_weight, key_weight, eps, zero_centred):
    return norm_heads(query, key, key_weight, query_weight, eps, zero_centred)


def conventions_are_swapped(query, key, query_weight, key_weight, eps, zero_centred):
    return norm_heads(query, key, query_weight, key_weight, eps, not zero_centred)


def key_is_not_normed(query, key, query_weight, key_weight, eps, zero_centred):
    return norm_heads(query, key, query_weight, key_weight, eps, zero_centred)[0], key


def heads_are_normed_as_one(query, key, query_weight, key_weight, eps, zero_centred):
    flat = [part.flatten(1) for part in (query, key)]
    weights = [w.repeat(part.shape[1]) for w, part in ((query_weight, query), (key_weight, key))]
    normed = norm_heads(*flat, *weights, eps, zero_centred)
    return normed[0].view_as(query), normed[1].view_as(key)


def gelu_is_exact(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate) * up


def gelu_is_a_silu(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def gelu_of_up(gate_up):
    up, gate = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def gelu_is_not_rounded(gate_up):
    gate, up = gate_up.double().chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


WRONG_FORMULAS = [
    *((NORM, wrong) for wrong in (weight_is_not_shifted, factor_is_rounded, unit_is_rounded)),
    (NORM, eps_of_the_norm_is_a_constant),
    *((SUM_NORM, wrong) for wrong in (sum_is_rounded_never_or_always, unsummed_residual_is_returned)),
    *((SUM_NORM, sum_of_a_norm_is_dropped), (PLAIN_SUM_NORM, plain_sum_is_always_rounded)),
    *((HEADS, wrong) for wrong in (weights_are_swapped, conventions_are_swapped, key_is_not_normed)),
    (HEADS, heads_are_normed_as_one),
    *((GELU, wrong) for wrong in (gelu_is_exact, gelu_is_a_silu, gelu_of_up, gelu_is_not_rounded)),
]


@pytest.mark.parametrize("op, wrong", WRONG_FORMULAS, ids=[wrong.__name__ for _, wrong in WRONG_FORMULAS])
def test_a_wrong_formula_is_caught_by_its_values(op, wrong):
    assert_caught(with_op(STEPS[op], op, wrong), values, KINDS[op])


@pytest.mark.parametrize("op", STEPS, ids=lambda op: op.name())
def test_the_right_pass_is_not_caught(op):
    for check in (values, memory, form, census):
        assert not is_caught(STEPS[op], check, KINDS[op], max_examples=5)


PRECONDITIONS = [
    (RMS_NORM, add_rms_norm, "computes in a narrow dtype", "zero_norm_in_own_dtype", values),
    (RMS_NORM, add_rms_norm, "reduces over", "zero_norm_over_tokens", values),
    (RMS_NORM, add_rms_norm, "laid out otherwise", "zero_norm_by_columns", form),
    (QK_NORM, qk_norm, "weights are kept otherwise", "head_norms_of_two_kinds", values),
    (QK_NORM, qk_norm, "another eps", "head_norms_by_two_eps", values),
    (QK_NORM, qk_norm, "after the norm", "head_norms_in_turn", values),
    (GELU_AND_MUL, silu_and_mul, "not the two halves", "gelu_mlp_of_swapped_halves", values),
    (GELU_AND_MUL, silu_and_mul, "computes in float32", "gelu_mlp_in_float32", values),
    (GELU_AND_MUL, silu_and_mul, "laid out otherwise", "gelu_mlp_by_columns", form),
]


@pytest.mark.parametrize(
    "step, module, reason, kind, check",
    PRECONDITIONS,
    ids=[f"{reason}: {kind}" for _, _, reason, kind, _ in PRECONDITIONS],
)
def test_a_precondition_left_out_is_caught(monkeypatch, step, module, reason, kind, check):
    monkeypatch.setattr(module, "_obstacle", forgetting(module._obstacle, reason))
    assert_caught(step, check, (kind,))
    assert is_caught(step, census, (kind,))


def test_pairs_of_heads_of_different_tensors_are_caught(monkeypatch):
    monkeypatch.setattr(
        qk_norm, "_heads_of", lambda norm: norm.graph if len(norm.meta["val"].shape) == 3 else None
    )
    assert_caught(QK_NORM, census, ("head_norms_of_two_tensors",))


def test_another_number_taken_for_one_is_caught(monkeypatch):
    def careless(pattern):
        if isinstance(pattern, Any_) and pattern.name == "one":
            return Any_("one")
        return (
            replace(pattern, args=tuple(map(careless, pattern.args)))
            if isinstance(pattern, Call)
            else pattern
        )

    monkeypatch.setattr(add_rms_norm, "PLAIN_PATTERNS", tuple(map(careless, add_rms_norm.PLAIN_PATTERNS)))
    assert_caught(RMS_NORM, values, ("zero_norm_by_two",))


def test_a_norm_taken_for_one_in_a_wider_dtype_is_caught(monkeypatch):
    """Inside of a norm that is rounded stands one that is not: both are sites, one counts."""
    patterns = [p for p in add_rms_norm.PLAIN_PATTERNS if p.targets != add_rms_norm.CONVERT]
    monkeypatch.setattr(add_rms_norm, "PLAIN_PATTERNS", tuple(patterns))
    step = with_op(RMS_NORM, NORM, weight_is_not_shifted)
    assert_caught(step, values, KINDS[NORM])
