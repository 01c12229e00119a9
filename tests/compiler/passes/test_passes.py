"""Every pass, on random programs: found what was planted, left the rest alone, changed no bit."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from torch import fx

from lamina.common.errors import CompileError
from lamina.compiler.capture.fingerprint import canonical_text
from lamina.compiler.passes import lower, pipeline
from lamina.compiler.passes.add_rms_norm import ADD_RMS_NORM, RMS_NORM
from lamina.compiler.passes.canonicalise import CANONICALISE
from lamina.compiler.passes.lower import LOWER
from lamina.compiler.passes.residual_barrier import RESIDUAL_BARRIER
from lamina.compiler.passes.silu_and_mul import GELU_AND_MUL, SILU_AND_MUL
from lamina.testing import checks
from lamina.testing.random_programs import BODIES, Program, Step, programs, trace

from ..pipelines import (
    ADD_RMS_NORM_LINEAR,
    GATE_QUANTIZED,
    GATED_W4A16,
    LINEAR,
    LINEAR_SILU_AND_MUL,
    MLP_W8A8,
    NORM_QUANTIZED,
    PIPELINE,
    QK_NORM,
    taken,
)
from ..tally import PROVED

NAMING = (RESIDUAL_BARRIER, ADD_RMS_NORM, RMS_NORM, QK_NORM, SILU_AND_MUL, GELU_AND_MUL, LINEAR)
JOINING = (ADD_RMS_NORM_LINEAR, NORM_QUANTIZED, GATE_QUANTIZED, MLP_W8A8, GATED_W4A16, LINEAR_SILU_AND_MUL)
GATES, FREE = (SILU_AND_MUL, GELU_AND_MUL), (RESIDUAL_BARRIER, ADD_RMS_NORM, RMS_NORM, LINEAR)


is_proving = settings.get_current_profile_name() != "ci"
thorough = settings(max_examples=10 * settings().max_examples) if is_proving else settings()


def single(kind, dtype, before=()):
    steps = tuple(Step(kind=name, eps=1e-5) for name in (*before, kind))
    return Program(steps=steps, dtype=dtype, hidden=8, intermediate=3, scale=1.0, seed=0)


def alone(graph):
    """Each pass with a graph as it would meet it, and what it makes of that graph."""
    canonical, _ = CANONICALISE.run(graph)
    normed, _ = RMS_NORM.run(canonical)
    named = pipeline.rewrite(canonical, NAMING).graph
    joined = pipeline.rewrite(named, JOINING).graph
    quantized = pipeline.rewrite(named, (NORM_QUANTIZED, GATE_QUANTIZED)).graph
    met = dict.fromkeys(JOINING, named) | {MLP_W8A8: quantized}
    met |= {CANONICALISE: graph, QK_NORM: normed, LOWER: joined}
    return [(step, met.get(step, canonical)) for step in PIPELINE]


@thorough
@given(programs())
def test_every_pass_does_on_every_program_what_it_says_and_nothing_else(program):
    """What is planted is found, no bit changes, outputs keep their memory, a second run finds nothing."""
    traced = trace(program)
    reports = {}
    for step, before in alone(traced.graph):
        after, reports[step] = checks.apply(step, before)
        checks.check_report(before, after, reports[step])
        if reports[step].num_matches:
            checks.check_values(traced, after)
            checks.check_values_of_ops(traced, after)
            checks.check_well_formed(traced, before, after)
            checks.check_memory(traced, after)
            checks.check_idempotent(step, after)
    check_census(traced.sites, reports)
    PROVED.update(programs=1, planted=num_sites(traced.sites), found=num_found(reports))


@pytest.mark.parametrize("kind", sorted(BODIES))
def test_each_fragment_is_known_for_what_it_is_behind_a_sum_and_a_gemm(kind):
    for dtype, before in ((torch.bfloat16, "add"), (torch.float64, "linear")):
        traced = trace(single(kind, dtype, (before,)))
        check_census(traced.sites, {step: step.run(graph)[1] for step, graph in alone(traced.graph)})
        check_census_in_order(traced)


def num_sites(sites):
    return sum(sites[step.name] for step in (*NAMING, *JOINING))


def num_found(reports):
    return sum(reports[step].num_matches for step in (*NAMING, *JOINING))


def check_census(sites, reports):
    """Of passes each by itself."""
    found = {step.name: reports[step].num_matches for step in (*NAMING, *JOINING)}
    assert found == {name: sites[name] for name in found}


def check_census_in_order(traced):
    """One after another: norms taken with their sum are not there for the pass behind."""
    sites = traced.sites
    reports = pipeline.rewrite(traced.graph, PIPELINE[:-1]).reports
    found = {report.name: report.num_matches for report in reports if report.name != "canonicalise"}
    left = sites["rms_norm"] - (sites["add_rms_norm"] - sites["fused_norms"])
    gates = sites["linear_silu_and_mul"] - sites["fused_gates"]
    expected = {name: sites[name] for name in found}
    assert found == expected | {"rms_norm": left, "linear_silu_and_mul": gates}


@thorough
@given(programs())
def test_any_passes_in_any_order_give_the_same_bits(program):
    chance = random.Random(program.seed)
    steps = chance.sample(PIPELINE, chance.randint(0, len(PIPELINE)))
    traced = trace(program)
    checks.check_values(traced, pipeline.rewrite(traced.graph, steps).graph)


@thorough
@given(programs())
def test_a_gate_commutes_with_every_pass_before_it_is_joined(program):
    """The others have an order: the pipeline's comments say which and why."""
    traced = trace(program)
    graph, _ = CANONICALISE.run(traced.graph)
    for gate, step in itertools.product(GATES, FREE):
        if traced.sites[gate.name] and traced.sites[step.name]:
            first = pipeline.rewrite(graph, (gate, step)).graph
            second = pipeline.rewrite(graph, (step, gate)).graph
            assert canonical_text(first) == canonical_text(second)


def targets(graph):
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    "kind, first_ops",
    [
        ("add_norm_mlp", ["lamina.add_rms_norm_linear.default", "lamina.linear.default"]),
        (
            "add_norm_mlp_with_gemm_kept",
            ["lamina.add_rms_norm_linear.default", "aten.mul.Tensor", "lamina.silu_and_mul.default"],
        ),
    ],
)
def test_a_gate_is_joined_where_it_alone_takes_the_projection(kind, first_ops):
    graph = trace(single(kind, torch.bfloat16)).graph
    ops = [target for target in targets(pipeline.rewrite(graph, PIPELINE[:-1]).graph) if "." in target]
    assert ops[: len(first_ops)] == first_ops


def test_canonicalise_leaves_one_call_of_each_kind():
    graph, _ = CANONICALISE.run(trace(single("repeated_calls", torch.float32)).graph)
    assert targets(graph) == ["aten.mul.Tensor", "aten.add.Tensor", "aten.mul.Tensor", "aten.add.Tensor"]


def test_canonicalise_drops_dead_and_idle_calls():
    graph, _ = CANONICALISE.run(trace(single("idle_calls", torch.bfloat16, ("add",))).graph)
    assert targets(graph) == [
        "aten.add.Tensor",
        "prims.convert_element_type.default",
    ]  # the output's own memory


def test_pieces_that_write_into_a_tensor_are_refused():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2)
    graph.output((graph.call_function(torch.ops.aten.add_.Tensor, (x, 1)),))
    with pytest.raises(CompileError, match=r"aten\.add_\.Tensor\) writes into a tensor"):
        pipeline.rewrite(graph, PIPELINE)


def test_a_norm_ahead_of_a_projection_in_four_bits_keeps_its_kernel_where_that_has_one():
    """So that the projection's kernel begins while it runs; elsewhere Inductor generates it."""
    named = pipeline.rewrite(
        trace(single("norm_mlp_w4a16", torch.bfloat16, ("linear",))).graph, PIPELINE[:-1]
    ).graph
    on_a_gpu, report = lower.run(named, choose=taken)
    assert "lamina.add_rms_norm.default" in targets(on_a_gpu)
    assert report.num_matches == 0
    assert len(report.skipped) == 1
    assert "lamina.add_rms_norm.default" not in targets(lower.run(named)[0])
