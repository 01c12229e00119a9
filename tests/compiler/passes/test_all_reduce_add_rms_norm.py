"""A sum over ranks joined with the residual sum and norm behind it: on random programs, and in a model."""

import dataclasses

import pytest
import torch
from hypothesis import given

from lamina.compiler.passes import all_reduce_add_rms_norm as joining
from lamina.compiler.passes import pipeline
from lamina.compiler.passes.add_rms_norm import ADD_RMS_NORM
from lamina.compiler.passes.all_reduce_add_rms_norm import ALL_REDUCE_ADD_RMS_NORM
from lamina.compiler.passes.canonicalise import CANONICALISE
from lamina.custom_ops import add_rms_norm, all_reduce
from lamina.custom_ops.all_reduce.group import MirrorGroup, group_of_thread
from lamina.testing import checks, random_programs
from lamina.testing.random_programs import Program, Step, programs, trace

from .. import pipelines

RANKS = 2
PASS = pipelines.ALL_REDUCE_ADD_RMS_NORM
OPS = torch.ops.lamina


def _normed(state, step, x, residual, unrounded=False):
    pair = (residual, x) if step.swapped else (x, residual)
    out, total = add_rms_norm(*pair, state.weight(state.hidden), step.eps, unrounded)
    state.residual = total
    state.set(out)


def rank_sum_normed(state, step):
    _normed(state, step, all_reduce(state.x, RANKS), state.residual)


def rank_sum_normed_unrounded(state, step):
    _normed(state, step, all_reduce(state.x, RANKS), state.residual, True)


def two_rank_sums_normed(state, step):
    _normed(state, step, all_reduce(state.x, RANKS), all_reduce(state.residual, RANKS))


def rank_sum_read_twice(state, step):
    total = all_reduce(state.x, RANKS)
    _normed(state, step, total, state.residual)
    state.extras.append(total * 2)  # handed on, it could end where nobody reads it


def rank_sum_added_to_itself(state, step):
    total = all_reduce(state.x, RANKS)
    _normed(state, step, total, total)


def rank_sum_with_a_bias(state, step):
    _normed(state, step, all_reduce(state.x, RANKS) + state.weight(state.hidden), state.residual)


def rank_sum_alone(state, step):
    state.extras.append(all_reduce(state.x * 2, RANKS))  # of x, or handed on, it would be part of a site


SITES = (rank_sum_normed, rank_sum_normed_unrounded, two_rank_sums_normed)
OTHERS = (rank_sum_read_twice, rank_sum_added_to_itself, rank_sum_with_a_bias, rank_sum_alone)
KINDS = (*(body.__name__ for body in (*SITES, *OTHERS)), "add_norm", "mlp")


@pytest.fixture(autouse=True, scope="module")
def bodies():
    """What is planted here, and gone afterwards; every rank says the same."""
    with pytest.MonkeyPatch.context() as patch, group_of_thread(MirrorGroup(RANKS)):
        for body in (*SITES, *OTHERS):
            patch.setitem(random_programs.BODIES, body.__name__, body)
        yield


def named(traced):
    """A program's graph as the pass meets it."""
    return pipeline.rewrite(traced.graph, (CANONICALISE, ADD_RMS_NORM)).graph


def planted(program):
    return sum(step.kind in [body.__name__ for body in SITES] for step in program.steps)


def check(step, program):
    """What is planted is found, no bit changes, outputs keep their memory, a second run finds nothing."""
    traced = trace(program)
    before = named(traced)
    after, report = checks.apply(step, before)
    assert report.num_matches == planted(program)
    checks.check_report(before, after, report)
    checks.check_values(traced, after)
    checks.check_values_of_ops(traced, after)
    checks.check_well_formed(traced, before, after)
    checks.check_memory(traced, after)
    checks.check_idempotent(step, after)
    fused = after.find_nodes(op="call_function", target=OPS.all_reduce_add_rms_norm.default)
    assert len(fused) == planted(program)


@given(programs(KINDS))
def test_every_site_is_joined_and_nothing_else_changes(program):
    check(PASS, program)


@pytest.mark.parametrize("kind", KINDS)
def test_each_fragment_is_known_for_what_it_is(kind):
    check(PASS, single(kind))


def single(*kinds):
    steps = tuple(Step(kind=kind, eps=1e-5, swapped=True) for kind in kinds)
    return Program(steps=steps, dtype=torch.bfloat16, hidden=8, intermediate=3, scale=1.0, seed=0)


def test_on_a_cpu_generated_code_serves():
    before = named(trace(single("rank_sum_normed")))
    after, report = checks.apply(ALL_REDUCE_ADD_RMS_NORM, before)
    assert report.num_matches == 0
    assert "on cpu the code that Inductor generates serves" in report.skipped[0]
    assert not after.find_nodes(op="call_function", target=OPS.all_reduce_add_rms_norm.default)


def _keeps_residual_of_itself(graph, norm, total):
    _, _, weight, eps, *rest = norm.args
    args = (total.args[0], norm.args[1], weight, eps, total.args[1], *rest)
    joining.replace(norm, joining.emit(graph, norm, OPS.all_reduce_add_rms_norm.default, *args))


def _forgets_when_to_round(graph, norm, total):
    left, right, weight, eps, *_ = norm.args
    args = (total.args[0], right if total is left else left, weight, eps, total.args[1])
    joining.replace(norm, joining.emit(graph, norm, OPS.all_reduce_add_rms_norm.default, *args))


def _is_alone(graph, norm, total):
    left, right, weight, eps, *rest = norm.args
    args = (total.args[0], right if total is left else left, weight, eps, 1, *rest)
    joining.replace(norm, joining.emit(graph, norm, OPS.all_reduce_add_rms_norm.default, *args))


FAULTS = {
    "the residual is the second operand, whichever is summed": ("_write", _keeps_residual_of_itself),
    "the sum is rounded before its norm": ("_write", _forgets_when_to_round),
    "there is one rank": ("_write", _is_alone),
    "others read it too": ("_obstacle", lambda norm, total: None),
    "no sum over ranks is one": ("_is_all_reduce", lambda value: False),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_it_is_caught(fault, monkeypatch):
    name, broken = FAULTS[fault]
    monkeypatch.setattr(joining, name, broken)
    caught = []
    for kind in KINDS:
        try:
            check(PASS, single(kind))
        except Exception:
            caught.append(kind)
    assert caught


def test_the_name_is_run_before_the_norm_is_joined_with_a_projection():
    names = [step.name for step in pipeline.PIPELINE]
    assert names.index(PASS.name) == names.index("add_rms_norm_linear") - 1
    assert dataclasses.replace(PASS, run=ALL_REDUCE_ADD_RMS_NORM.run) == ALL_REDUCE_ADD_RMS_NORM
