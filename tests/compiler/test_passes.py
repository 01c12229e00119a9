"""Every pass, on random programs: found what was planted, left the rest alone, changed no bit."""

import functools
import random

import pytest
import torch
from hypothesis import given, seed
from torch import fx

from lamina.common.errors import CompileError
from lamina.compiler.fingerprint import canonical_text
from lamina.compiler.passes import pipeline
from lamina.compiler.passes.add_rms_norm import ADD_RMS_NORM, RMS_NORM
from lamina.compiler.passes.canonicalise import CANONICALISE
from lamina.compiler.passes.lower import LOWER
from lamina.compiler.passes.residual_barrier import RESIDUAL_BARRIER
from lamina.compiler.passes.silu_and_mul import SILU_AND_MUL

from . import checks
from .checks import ADD_RMS_NORM_LINEAR, LINEAR, PIPELINE
from .programs import BODIES, Program, Step, programs, trace

NAMING = (RESIDUAL_BARRIER, ADD_RMS_NORM, RMS_NORM, SILU_AND_MUL, LINEAR, ADD_RMS_NORM_LINEAR)


def single(kind, dtype, before=()):
    steps = tuple(Step(kind=name, eps=1e-5) for name in (*before, kind))
    return Program(steps=steps, dtype=dtype, hidden=8, intermediate=3, scale=1.0, seed=0)


same_programs = seed(0)  # for every claim, so that each program is traced once


@functools.lru_cache(maxsize=256)
def alone(program):
    """Each pass with a graph as it would meet it, and what it makes of that graph."""
    graph = trace(program).graph
    canonical, _ = CANONICALISE.run(graph)
    named = pipeline.rewrite(canonical, NAMING[:-1]).graph
    graphs = {CANONICALISE: graph, ADD_RMS_NORM_LINEAR: named, LOWER: named}
    before = {step: graphs.get(step, canonical) for step in PIPELINE}
    return [(step, graph, *checks.apply(step, graph)) for step, graph in before.items()]


@same_programs
@given(programs())
def test_no_pass_changes_a_bit(program):
    traced = trace(program)
    for _, _, after, _ in alone(program):
        checks.check_values(traced, after)


@same_programs
@given(programs())
def test_ops_put_in_by_a_pass_give_the_bits_of_the_formula(program):
    traced = trace(program)
    for _, _, after, _ in alone(program):
        checks.check_values_of_ops(traced, after)


@same_programs
@given(programs())
def test_graphs_stay_well_formed_and_outputs_keep_their_memory(program):
    traced = trace(program)
    for _, before, after, _ in alone(program):
        checks.check_well_formed(traced, before, after)
        checks.check_memory(traced, after)


@same_programs
@given(programs())
def test_a_second_run_finds_nothing_and_text_changes_only_with_a_match(program):
    for step, before, after, report in alone(program):
        checks.check_idempotent(step, after)
        checks.check_report(before, after, report)


@same_programs
@given(programs())
def test_what_a_program_plants_is_found_and_nothing_else(program):
    check_census(program)


@pytest.mark.parametrize("kind", sorted(BODIES))
def test_each_fragment_is_known_for_what_it_is_behind_a_sum_and_a_product(kind):
    for dtype, before in ((torch.bfloat16, "add"), (torch.float64, "linear")):
        check_census(single(kind, dtype, (before,)))


def check_census(program):
    sites = trace(program).sites
    assert {step.name: report.num_matches for step, _, _, report in alone(program) if step in NAMING} == sites
    reports = pipeline.rewrite(trace(program).graph, PIPELINE).reports
    found = {report.name: report.num_matches for report in reports}
    assert found | sites | {"rms_norm": sites["rms_norm"] - sites["add_rms_norm"]} == found


@same_programs
@given(programs())
def test_any_passes_in_any_order_give_the_same_bits(program):
    chance = random.Random(program.seed)
    steps = chance.sample(PIPELINE, chance.randint(0, len(PIPELINE)))
    checks.check_values(trace(program), pipeline.rewrite(trace(program).graph, steps).graph)


@same_programs
@given(programs())
def test_silu_and_mul_commutes_with_every_pass_before_it_is_joined(program):
    """The others have an order: the pipeline's comments say which and why."""
    graph, _ = CANONICALISE.run(trace(program).graph)
    for step in (RESIDUAL_BARRIER, ADD_RMS_NORM, RMS_NORM, LINEAR):
        first = pipeline.rewrite(graph, (SILU_AND_MUL, step)).graph
        second = pipeline.rewrite(graph, (step, SILU_AND_MUL)).graph
        assert canonical_text(first) == canonical_text(second)


def targets(graph):
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    "kind, first_ops",
    [
        ("add_norm_mlp", ["lamina.add_rms_norm_linear.default", "lamina.linear.default"]),
        (
            "add_norm_mlp_with_product_kept",
            ["lamina.add_rms_norm_linear.default", "aten.mul.Tensor", "lamina.silu_and_mul.default"],
        ),
    ],
)
def test_a_gate_is_joined_where_it_alone_takes_the_product(kind, first_ops):
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
