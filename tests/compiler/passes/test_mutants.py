"""The checks are tested: passes broken on purpose, one fault each, and every one must be caught."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lamina.compiler.passes import (
    add_rms_norm,
    add_rms_norm_linear,
    canonicalise,
    linear,
    residual_barrier,
    silu_and_mul,
)
from lamina.compiler.passes.add_rms_norm import ADD_RMS_NORM, RMS_NORM
from lamina.compiler.passes.canonicalise import CANONICALISE
from lamina.compiler.passes.match import Any_, Call
from lamina.compiler.passes.residual_barrier import RESIDUAL_BARRIER
from lamina.compiler.passes.silu_and_mul import SILU_AND_MUL
from lamina.custom_ops.rms_norm.reference import rms_norm

from ..mutants import assert_caught, census, forgetting, form, is_caught, memory, values, with_op
from ..pipelines import ADD_RMS_NORM_LINEAR, LINEAR

OPS = {
    RMS_NORM: torch.ops.lamina.rms_norm.default,
    ADD_RMS_NORM: torch.ops.lamina.add_rms_norm.default,
    SILU_AND_MUL: torch.ops.lamina.silu_and_mul.default,
    LINEAR: torch.ops.lamina.linear.default,
    ADD_RMS_NORM_LINEAR: torch.ops.lamina.add_rms_norm_linear.default,
}
KINDS = {
    RMS_NORM: ("norm", "written_norm"),
    ADD_RMS_NORM: ("add_norm", "norm_of_kept_sum"),
    SILU_AND_MUL: ("mlp", "written_mlp"),
    LINEAR: ("linear", "biased_linear"),
    ADD_RMS_NORM_LINEAR: ("add_norm_linear", "add_norm_biased_mlp"),
    RESIDUAL_BARRIER: ("linear", "add", "add_norm"),
    CANONICALISE: ("repeated_calls", "idle_calls", "equal_outputs", "output_of_idle_call"),
}


def wide(x):
    return x.double() if x.dtype == torch.float64 else x.float()


def unit(x, eps, dim=-1):
    return wide(x) * torch.rsqrt(wide(x).pow(2).mean(dim, keepdim=True) + eps)


def eps_is_a_constant(x, weight, eps):
    return rms_norm(x, weight, 1e-5)


def eps_is_ignored(x, weight, eps):
    return rms_norm(x, weight, 0.0)


def eps_is_outside_the_root(x, weight, eps):
    return (unit(x, 0.0) + eps).to(x.dtype) * weight


def weight_is_applied_before_the_cast(x, weight, eps):
    return (unit(x, eps) * weight).to(x.dtype)


def one_rounding_is_added(x, weight, eps):
    return x * torch.rsqrt(wide(x).pow(2).mean(-1, keepdim=True) + eps).to(x.dtype) * weight


def reduction_is_over_tokens(x, weight, eps):
    return unit(x, eps, dim=0).to(x.dtype) * weight


def sum_stands_for_mean(x, weight, eps):
    factor = torch.rsqrt(wide(x).pow(2).sum(-1, keepdim=True) + eps)
    return (wide(x) * factor).to(x.dtype) * weight


def residual_is_returned_unsummed(x, residual, weight, eps):
    return rms_norm(x + residual, weight, eps), residual


def sum_is_dropped_from_the_norm(x, residual, weight, eps):
    return rms_norm(x, weight, eps), x + residual


def norm_is_of_the_unrounded_sum(x, residual, weight, eps):
    total = wide(x) + wide(residual)
    return unit(total, eps).to(x.dtype) * weight, total.to(x.dtype)


def results_are_swapped(x, residual, weight, eps):
    total = x + residual
    return total, rms_norm(total, weight, eps)


def halves_are_swapped(gate_up):
    up, gate = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def product_is_rounded_once(gate_up):
    gate, up = wide(gate_up).chunk(2, -1)
    return (gate / (torch.exp(-gate) + 1) * up).to(gate_up.dtype)


def gate_is_rounded_inside(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return gate / (torch.exp(-gate) + 1) * up


def gate_is_a_sigmoid(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return torch.sigmoid(gate) * up


def bias_is_dropped(x, weight, bias):
    return x @ weight.t()


def weight_is_not_transposed(x, weight, bias):
    return x @ weight if bias is None else x @ weight + bias


def gemm_is_of_the_sum(x, residual, norm_weight, eps, weight, bias, gated):
    return joined(lambda total: total, x, residual, weight, bias, gated)


def norm_is_not_weighted(x, residual, norm_weight, eps, weight, bias, gated):
    ones = torch.ones_like(norm_weight)
    return joined(lambda total: rms_norm(total, ones, eps), x, residual, weight, bias, gated)


def norm_is_not_rounded(x, residual, norm_weight, eps, weight, bias, gated):
    def norm(total):
        return (unit(total, eps) * norm_weight).to(x.dtype)

    return joined(norm, x, residual, weight, bias, gated)


def gate_is_left_out(x, residual, norm_weight, eps, weight, bias, gated):
    gemm, total = joined(lambda t: rms_norm(t, norm_weight, eps), x, residual, weight, bias, False)
    return (gemm.chunk(2, -1)[1] if gated else gemm), total


def up_is_gated(x, residual, norm_weight, eps, weight, bias, gated):
    gemm, total = joined(lambda t: rms_norm(t, norm_weight, eps), x, residual, weight, bias, False)
    return (halves_are_swapped(gemm) if gated else gemm), total


def residual_is_handed_on(x, residual, norm_weight, eps, weight, bias, gated):
    gemm, _ = joined(lambda t: rms_norm(t, norm_weight, eps), x, residual, weight, bias, gated)
    return gemm, residual


def joined(norm, x, residual, weight, bias, gated):
    total = x + residual
    gemm = F.linear(norm(total), weight, bias)
    gate, up = gemm.chunk(2, -1) if gated else (gemm, None)
    return (F.silu(gate) * up if gated else gemm), total


WRONG_FORMULAS = [
    *((RMS_NORM, wrong) for wrong in (eps_is_a_constant, eps_is_ignored, eps_is_outside_the_root)),
    *((RMS_NORM, wrong) for wrong in (weight_is_applied_before_the_cast, one_rounding_is_added)),
    *((RMS_NORM, wrong) for wrong in (reduction_is_over_tokens, sum_stands_for_mean)),
    *((ADD_RMS_NORM, wrong) for wrong in (residual_is_returned_unsummed, sum_is_dropped_from_the_norm)),
    *((ADD_RMS_NORM, wrong) for wrong in (norm_is_of_the_unrounded_sum, results_are_swapped)),
    *((SILU_AND_MUL, wrong) for wrong in (halves_are_swapped, product_is_rounded_once)),
    *((SILU_AND_MUL, wrong) for wrong in (gate_is_rounded_inside, gate_is_a_sigmoid)),
    *((LINEAR, wrong) for wrong in (bias_is_dropped, weight_is_not_transposed)),
    *((ADD_RMS_NORM_LINEAR, wrong) for wrong in (gemm_is_of_the_sum, norm_is_not_weighted)),
    *((ADD_RMS_NORM_LINEAR, wrong) for wrong in (norm_is_not_rounded, gate_is_left_out, up_is_gated)),
    (ADD_RMS_NORM_LINEAR, residual_is_handed_on),
]


@pytest.mark.parametrize("step, wrong", WRONG_FORMULAS, ids=[wrong.__name__ for _, wrong in WRONG_FORMULAS])
def test_a_wrong_formula_is_caught_by_its_values(step, wrong):
    assert_caught(with_op(step, OPS[step], wrong), values, KINDS[step])


@pytest.mark.parametrize("step", OPS, ids=lambda step: step.name)
def test_the_right_pass_is_not_caught(step):
    for check in (values, memory, form, census):
        assert not is_caught(step, check, KINDS[step], max_examples=5)


PRECONDITIONS = [
    (RMS_NORM, add_rms_norm, "computes in a narrow dtype", "norm_in_own_dtype", values),
    (RMS_NORM, add_rms_norm, "computes in float32", "norm_in_float32", values),
    (RMS_NORM, add_rms_norm, "reduces over", "norm_over_tokens", values),
    (RMS_NORM, add_rms_norm, "mixed dtypes", "norm_rounded_to_other_dtype", values),
    (RMS_NORM, add_rms_norm, "mixed dtypes", "norm_with_weight_in_other_dtype", form),
    (RMS_NORM, add_rms_norm, "laid out otherwise", "norm_by_columns", form),
    (ADD_RMS_NORM, add_rms_norm, "the weight is computed after", "norm_with_late_weight", values),
    (ADD_RMS_NORM, add_rms_norm, "operands of different shapes", "add_bias", form),
    (ADD_RMS_NORM, add_rms_norm, "laid out otherwise", "add_norm_by_columns", form),
    (SILU_AND_MUL, silu_and_mul, "not the two halves", "mlp_of_swapped_halves", values),
    (SILU_AND_MUL, silu_and_mul, "not the two halves", "mlp_of_thirds", values),
    (SILU_AND_MUL, silu_and_mul, "not the two halves", "mlp_of_two_gemms", values),
    (SILU_AND_MUL, silu_and_mul, "not the two halves", "mlp_split_over_tokens", values),
    (SILU_AND_MUL, silu_and_mul, "computes in float32", "mlp_in_float32", values),
    (SILU_AND_MUL, silu_and_mul, "laid out otherwise", "mlp_by_columns", form),
    (RESIDUAL_BARRIER, residual_barrier, "scaled sum", "add_scaled", values),
    (LINEAR, linear, "scaled sum", "gemm_with_scaled_bias", values),
    (LINEAR, linear, "not a transposed input", "gemm_of_untransposed", values),
    (LINEAR, linear, "not a transposed input", "gemm_of_computed_weight", census),
    (LINEAR, linear, "as many columns as there are tokens", "mlp_by_columns", census),
    (LINEAR, linear, "laid out otherwise", "gemm_of_columns", census),
    (LINEAR, linear, "not one number a column", "gemm_with_matrix_for_bias", form),
    (ADD_RMS_NORM_LINEAR, add_rms_norm_linear, "others read", "add_norm_read_by_two_linears", census),
    (ADD_RMS_NORM_LINEAR, add_rms_norm_linear, "after the sum", "add_norm_linear_with_late_bias", values),
]


@pytest.mark.parametrize(
    "step, module, reason, kind, check",
    PRECONDITIONS,
    ids=[f"{reason}: {kind}" for _, _, reason, kind, _ in PRECONDITIONS],
)
def test_a_precondition_left_out_is_caught(monkeypatch, step, module, reason, kind, check):
    kinds = (kind, "linear", "norm") if kind.startswith("add_") else (kind,)
    name = "obstacle" if module is linear else "_obstacle"
    monkeypatch.setattr(module, name, forgetting(getattr(module, name), reason))
    assert_caught(step, check, kinds)
    assert is_caught(step, census, kinds)


def test_the_second_match_of_a_chain_lost_is_caught(monkeypatch):
    def run(graph):
        matches = []

        def find_once(pattern, node):
            match = None if matches else original(pattern, node)
            matches.extend([match] if match else [])
            return match

        monkeypatch.setattr(add_rms_norm, "find", find_once)
        return RMS_NORM.run(graph)

    original = add_rms_norm.find
    assert_caught(replace(RMS_NORM, run=run), census, KINDS[RMS_NORM])


def test_the_second_match_of_a_chain_taken_for_the_first_is_caught_by_its_values(monkeypatch):
    def run(graph):
        matches = []

        def find_as_before(pattern, node):
            match = original(pattern, node)
            matches.extend([match] if match else [])
            return match and replace(match, bound=match.bound | {"x": matches[0].bound["x"]})

        monkeypatch.setattr(add_rms_norm, "find", find_as_before)
        return RMS_NORM.run(graph)

    original = add_rms_norm.find
    assert_caught(replace(RMS_NORM, run=run), values, KINDS[RMS_NORM])


def test_an_order_of_operands_not_thought_of_is_caught(monkeypatch):
    def fixed(pattern):
        if isinstance(pattern, Any_) or not isinstance(pattern, Call):
            return pattern
        return replace(pattern, args=tuple(map(fixed, pattern.args)), commutes=False)

    monkeypatch.setattr(add_rms_norm, "PLAIN_PATTERNS", tuple(map(fixed, add_rms_norm.PLAIN_PATTERNS)))
    assert_caught(RMS_NORM, census, KINDS[RMS_NORM])


def test_memory_shared_by_a_merge_is_caught(monkeypatch):
    monkeypatch.setattr(canonicalise, "_shown", lambda graph: set())
    assert_caught(CANONICALISE, memory, KINDS[CANONICALISE])


def test_a_conversion_that_loses_bits_taken_for_idle_is_caught(monkeypatch):
    def idle(node):
        return node.target is canonicalise.CONVERT and bool(node.all_input_nodes)

    monkeypatch.setattr(canonicalise, "_is_idle", idle)
    assert_caught(CANONICALISE, values, ("add_norm", "norm"))


def test_a_sum_rounded_before_it_is_added_is_caught(monkeypatch):
    def to_bfloat16(graph, node, target, *args):
        args = (args[0], torch.bfloat16) if args[-1] is torch.float32 else args
        return emit(graph, node, target, *args)

    emit = residual_barrier.emit
    monkeypatch.setattr(residual_barrier, "emit", to_bfloat16)
    assert_caught(RESIDUAL_BARRIER, values, KINDS[RESIDUAL_BARRIER])


@pytest.mark.parametrize(
    "name, broken",
    [
        ("copy_graph", lambda graph: graph),
        ("erase_dead", lambda graph: 0),
        ("replace", lambda old, new: (old.replace_all_uses_with(new), new.meta.pop("val"))),
    ],
    ids=["the argument changed", "dead calls left", "no meta on what is new"],
)
def test_careless_handling_of_graphs_is_caught(monkeypatch, name, broken):
    for step, module in ((RMS_NORM, add_rms_norm), (SILU_AND_MUL, silu_and_mul)):
        monkeypatch.setattr(module, name, broken)
        assert_caught(step, form, KINDS[step])
