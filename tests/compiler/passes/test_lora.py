"""What adapters add joined with the gate, or sum and norm, behind it: on random programs, and in a model."""

import pytest
import torch
from hypothesis import given

from lamina.common.progress import say_nothing
from lamina.compiler.passes import lora as joining
from lamina.compiler.passes import lower, pipeline
from lamina.compiler.passes.add_rms_norm import ADD_RMS_NORM
from lamina.compiler.passes.canonicalise import CANONICALISE
from lamina.compiler.passes.lora import LORA_GATE, LORA_NORM
from lamina.compiler.passes.silu_and_mul import SILU_AND_MUL
from lamina.custom_ops import add_rms_norm, lora, silu_and_mul
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.startup.loader import resolve_runtime
from lamina.testing import checks, random_programs
from lamina.testing.random_programs import Program, Step, programs, run, trace

from .. import pipelines
from .test_golden import op_list, pieces_of

OPS = torch.ops.lamina
SLOTS, RANK, SLOT_OF_EACH = 2, 3, 16


def adapted(state, y, rows):
    """y with what the slots of tokens, some of them none, add by x."""
    a = state.weight(SLOTS, len(rows) * RANK, state.hidden)
    b = state.weight(SLOTS, sum(rows), RANK)
    scales = state.weight(SLOTS, len(rows), dtype=torch.float32)
    slots = state.weight(SLOT_OF_EACH, dtype=torch.float32).sign().to(torch.int32)
    return lora(y, state.x, a, b, scales, slots, rows)


def gate_up(state):
    return torch.cat([state.x, state.residual], dim=1)


def gated(state, result):
    state.residual = silu_and_mul(result) + state.residual


def adapted_gate(state, step):
    gated(state, adapted(state, gate_up(state), (state.hidden, state.hidden)))


def normed(state, step, x, unrounded=False):
    pair = (state.residual, x) if step.swapped else (x, state.residual)
    out, total = add_rms_norm(*pair, state.weight(state.hidden), step.eps, unrounded)
    state.residual = total
    state.set(out)


def adapted_norm(state, step):
    normed(state, step, adapted(state, state.x * 2, (state.hidden,)))


def gate_of_one_part(state, step):
    gated(state, adapted(state, gate_up(state), (2 * state.hidden,)))


def gate_of_other_parts(state, step):
    half = state.hidden // 2
    gated(state, adapted(state, gate_up(state), (state.hidden + half, state.hidden - half)))


def gate_read_twice(state, step):
    result = adapted(state, gate_up(state), (state.hidden, state.hidden))
    gated(state, result)
    state.extras.append(result * 2)


def norm_of_two_parts(state, step):
    half = state.hidden // 2
    normed(state, step, adapted(state, state.x * 2, (half, state.hidden - half)))


def norm_before_rounding(state, step):
    normed(state, step, adapted(state, state.x * 2, (state.hidden,)), True)


def norm_read_twice(state, step):
    result = adapted(state, state.x * 2, (state.hidden,))
    normed(state, step, result)
    state.residual = state.residual + result


def norm_of_itself(state, step):
    result = adapted(state, state.x * 2, (state.hidden,))
    out, total = add_rms_norm(result, result, state.weight(state.hidden), step.eps)
    state.residual = state.residual + total
    state.set(out)


def adapted_alone(state, step):
    state.extras.append(adapted(state, state.x * 2, (state.hidden,)))


GATES, NORMS = (adapted_gate,), (adapted_norm,)
OTHERS = (
    *(gate_of_one_part, gate_of_other_parts, gate_read_twice),
    *(norm_of_two_parts, norm_before_rounding, norm_read_twice, norm_of_itself, adapted_alone),
)
KINDS = (*(body.__name__ for body in (*GATES, *NORMS, *OTHERS)), "add_norm", "mlp")
SITES = {
    OPS.lora_silu_and_mul.default: (pipelines.LORA_GATE, GATES),
    OPS.lora_add_rms_norm.default: (pipelines.LORA_NORM, NORMS),
}


@pytest.fixture(autouse=True, scope="module")
def bodies():
    """What is planted here, and gone afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        for body in (*GATES, *NORMS, *OTHERS):
            patch.setitem(random_programs.BODIES, body.__name__, body)
        yield


def single(*kinds):
    steps = tuple(Step(kind=kind, eps=1e-5, swapped=True) for kind in kinds)
    return Program(steps=steps, dtype=torch.bfloat16, hidden=8, intermediate=3, scale=1.0, seed=0)


def check(program):
    """What is planted is found, no bit changes, outputs keep their memory, a second run finds nothing."""
    traced = trace(program)
    named = graph = pipeline.rewrite(traced.graph, (CANONICALISE, ADD_RMS_NORM, SILU_AND_MUL)).graph
    for op, (step, planted) in SITES.items():
        before = graph
        graph, report = checks.apply(step, before)
        kinds = [body.__name__ for body in planted]
        assert report.num_matches == sum(step.kind in kinds for step in program.steps)
        assert len(graph.find_nodes(op="call_function", target=op)) == report.num_matches
        checks.check_report(before, graph, report)
        checks.check_well_formed(traced, before, graph)
        checks.check_memory(traced, graph)
        checks.check_idempotent(step, graph)
    for formulas in (checks.FORMULAS, {}):  # and the ops as this device runs them
        wanted, found = (run(each, traced.values(7), formulas) for each in (named, graph))
        for left, right in zip(wanted, found, strict=True):
            checks.assert_same_bits(left, right)


@given(programs(KINDS))
def test_every_site_is_joined_and_nothing_else_changes(program):
    check(program)


@pytest.mark.parametrize("kind", KINDS)
def test_each_fragment_is_known_for_what_it_is(kind):
    check(single(kind))


def test_on_a_cpu_generated_code_serves():
    named = pipeline.rewrite(trace(single("adapted_gate", "adapted_norm")).graph, (CANONICALISE,)).graph
    for step in (LORA_GATE, LORA_NORM):
        report = checks.apply(step, named)[1]
        assert report.num_matches == 0
        assert "on cpu the code that Inductor generates serves" in report.skipped[0]


def _keeps_residual_of_itself(graph, norm, lora):
    args = (*lora.args, norm.args[1], *norm.args[2:4])
    joining.replace(norm, joining.emit(graph, norm, OPS.lora_add_rms_norm.default, *args))


def _forgets_the_factors(graph, gate, lora):
    y, x, a, b, _, slots, rows = lora.args
    scales = joining.emit(graph, gate, torch.ops.aten.new_ones.default, lora.args[4], [SLOTS, 2])
    args = (y, x, a, b, scales, slots, rows)
    joining.replace(gate, joining.emit(graph, gate, OPS.lora_silu_and_mul.default, *args))


FAULTS = {
    "the residual is the second operand, whichever is adapted": ("_write_norm", _keeps_residual_of_itself),
    "factors are one": ("_write_gate", _forgets_the_factors),
    "whoever reads it": ("_obstacle", lambda reader, lora: None),
    "nothing is adapted": ("_is_lora", lambda value: False),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_it_is_caught(fault, monkeypatch):
    name, broken = FAULTS[fault]
    monkeypatch.setattr(joining, name, broken)
    caught = []
    for kind in KINDS:
        try:
            check(single(kind))
        except Exception:
            caught.append(kind)
    assert caught


@pytest.fixture(scope="module")
def pieces(tiny_folder, tmp_path_factory):
    """Those of the plan of steps with adapters, by their place."""
    return adapted_pieces(tiny_folder, tmp_path_factory.mktemp("inductor"))


def adapted_pieces(model, folder, **more):
    given = {"dtype": "bfloat16", "lora": "4:8", "num_kv_blocks": 64, "block_size": 8, **more}
    program = resolve_runtime(RuntimeConfig(model=model, **given), say_nothing).adapted().program()
    return pieces_of(program, folder)


def lamina_ops(graph):
    return [line.strip().split(".")[1] for line in op_list(graph).splitlines() if "lamina." in line]


def test_a_layer_with_adapters_is_seven_calls_on_a_gpu_and_no_generated_code(pieces):
    """Each of which begins before what it reads is there: behind generated code none does."""
    projection = ["linear", "lora_add_rms_norm"]
    ahead = [*projection, "linear", "lora_silu_and_mul"]
    wanted = [
        ["rms_norm", "linear", "lora"],
        [*ahead, *projection, "linear", "lora"],
        [*ahead, *projection],
    ]
    for graph, calls in zip(pieces, wanted, strict=True):
        named = pipeline.rewrite(graph, pipelines.PIPELINE[:-1]).graph
        on_a_gpu, report = lower.run(named, choose=pipelines.taken)
        found = lamina_ops(on_a_gpu)
        assert found[: len(calls)] == calls
        assert all("loads its weights" in text for text in report.skipped)


@pytest.mark.parametrize(
    ("quantization", "gemm"), [("fp8", "linear_w8a8"), ("w4a16", "linear_w4a16"), ("int8", "linear_int8")]
)
def test_quantized_projections_are_joined_with_the_same(quantization, gemm, tiny_folder, tmp_path):
    _, middle, _ = adapted_pieces(tiny_folder, tmp_path, quantization=quantization)
    found = lamina_ops(pipeline.rewrite(middle, pipelines.PIPELINE[:-1]).graph)
    joined = ("lora_add_rms_norm", "lora_silu_and_mul", "lora_add_rms_norm", "lora")
    assert found[: 2 * len(joined)] == [op for each in joined for op in (gemm, each)]


def test_a_norm_or_gate_ahead_of_adapters_keeps_its_kernel_where_those_have_one(pieces):
    for place, graph in zip(("first", "middle"), pieces, strict=False):
        without = [step for step in pipelines.PIPELINE[:-1] if step.name not in ("lora_add_rms_norm",)]
        named = pipeline.rewrite(graph, without).graph
        norm = {"first": "rms_norm", "middle": "add_rms_norm"}[place]
        assert norm in lamina_ops(lower.run(named, choose=pipelines.taken)[0])
        assert norm not in lamina_ops(lower.run(named, choose=pipelines.left)[0])
