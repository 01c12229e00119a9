"""What the passes make of LLaMA's three pieces, op by op, as pieces.txt holds it."""

from pathlib import Path

import pytest
import torch

from lamina.compiler.capture.capture import capture
from lamina.compiler.capture.fingerprint import canonical_text, group_equal
from lamina.compiler.capture.split import split
from lamina.compiler.passes import pipeline
from lamina.compiler.passes.gemms import gemms
from lamina.compiler.torch_internals import torch_compat
from lamina.testing import apply, check_idempotent

from .. import pipelines
from ..tiny import CPU, make_tiny

GOLDEN = Path(__file__).parent / "pieces.txt"
PLACES = ("first", "middle", "last")
NUM_LOWERED = {"first": 2, "middle": 4, "last": 3}  # norms, gates and rotations
FAST = pipeline.select(None, "fast")


def aten_pieces(folder, **changes):
    """The unique pieces of a TINY LLaMA by their place, as all_pieces has them."""
    return dict(zip(PLACES, all_pieces(folder, **changes), strict=True))


def all_pieces(folder, **changes):
    """The unique pieces of a TINY model as Inductor is given them, before any pass; no code is generated."""
    return pieces_of(make_tiny(**changes).program, folder)


def pieces_of(program, folder):
    """The same of any program."""
    captured = capture(program.forward, torch_compat.fake_tensors(program.parameters, CPU), CPU)
    modules = [piece.graph for piece in split(captured.graph, captured.inputs).pieces]
    first = group_equal(canonical_text(module.graph) for module in modules)
    found = []

    def stop(graph):
        found.append(graph)
        raise torch_compat.AlreadyKnown

    for index in sorted(set(first)):
        assert torch_compat.generate(modules[index], stop, folder) is None
    return found


def op_list(graph):
    return "".join(f"  {node.target}\n" for node in graph.nodes if node.op == "call_function" and is_op(node))


def is_op(node):
    """Items of a tuple are no ops, and torch versions ask for sizes in different places."""
    return torch_compat.op_name(node.target) not in ("", "aten::sym_size")


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    return aten_pieces(tmp_path_factory.mktemp("inductor"), dtype=torch.bfloat16, num_layers=3)


def test_pieces_are_what_the_file_says(pieces):
    """Changed on purpose: raise the version of the pass, and put the printed text into the file."""
    written = ""
    for place, graph in pieces.items():
        named = pipeline.rewrite(graph, pipeline.select(None, "exact")).graph
        lowered = pipeline.rewrite(graph, pipelines.LOWERED).graph
        on_a_gpu = pipeline.rewrite(graph, pipelines.PIPELINE[:-1]).graph
        written += f"{place}, ops named\n{op_list(named)}{place}, ops lowered\n{op_list(lowered)}"
        written += f"{place}, as on a GPU\n{op_list(on_a_gpu)}"
    print(written)
    assert written == GOLDEN.read_text()


def test_every_norm_sum_and_gate_of_the_model_is_a_site(pieces):
    reports = {place: pipeline.rewrite(graph, pipelines.LOWERED).reports for place, graph in pieces.items()}
    found = {
        place: {report.name: report.num_matches for report in reports if report.name != "canonicalise"}
        for place, reports in reports.items()
    }
    silent = {
        "residual_barrier": 0,  # add_rms_norm's formula widens its sum itself
        "linear": 0,  # of devices with kernels for it
        "all_reduce_add_rms_norm": 0,  # of several ranks
        "add_rms_norm_linear": 0,
        "qk_norm": 0,  # of other families
        "gelu_and_mul": 0,
        "rms_norm_quantized": 0,  # of projections in FP8
        "act_and_mul_quantized": 0,
        "mlp_w8a8": 0,
        "gated_w4a16": 0,  # of projections in four bits
        "linear_lora": 0,  # without adapters
        "linear_silu_and_mul": 0,  # behind no norm that takes it along
    }
    full = silent | {"add_rms_norm": 2, "rms_norm": 0, "silu_and_mul": 1}
    assert found["first"] == silent | {
        "add_rms_norm": 0,
        "rms_norm": 1,
        "silu_and_mul": 0,
        "lower": NUM_LOWERED["first"],
    }
    assert found["middle"] == full | {"lower": NUM_LOWERED["middle"]}
    assert found["last"] == full | {"lower": NUM_LOWERED["last"]}
    skipped = [text for place in reports.values() for report in place for text in report.skipped]
    assert all(text.endswith("as on a device without kernels") for text in skipped)


def test_gemms_left_to_ops_are_listed_once_with_what_a_choice_of_kernels_depends_on(pieces):
    found = {
        place: gemms(pipeline.rewrite(graph, pipelines.PIPELINE).graph) for place, graph in pieces.items()
    }
    output, down = ("linear", 64, 64), ("linear", 64, 128)
    gate_up, qkv = ("norm_gated", 256, 64), ("norm", 128, 64)
    shapes = {place: [(p.kind, p.rows, p.columns) for p in listed] for place, listed in found.items()}
    assert shapes["first"] == [("linear", 128, 64)]
    assert shapes["middle"] == [output, gate_up, down, qkv]
    assert shapes["last"] == [output, gate_up, down]
    assert {p.dtype for listed in found.values() for p in listed} == {"bfloat16"}
    lowered = [gemms(pipeline.rewrite(graph, pipelines.LOWERED).graph) for graph in pieces.values()]
    assert lowered == [()] * 3


def test_a_cpu_runs_the_ops_that_a_gpu_runs(pieces):
    for graph in pieces.values():
        on_a_gpu, here = (pipeline.rewrite(graph, passes).graph for passes in (pipelines.PIPELINE, FAST))
        assert op_list(here) == op_list(on_a_gpu)


def test_what_no_kernel_computes_is_left_to_inductor(tmp_path):
    for graph in aten_pieces(tmp_path, dtype=torch.float64, num_layers=2).values():
        rewritten = pipeline.rewrite(graph, FAST)
        assert "lamina::" not in op_list(rewritten.graph)
        assert any("torch.float64 is left to" in text for step in rewritten.reports for text in step.skipped)


def test_a_model_in_float32_has_the_same_sites_and_nothing_to_keep_apart(tmp_path):
    for place, graph in aten_pieces(tmp_path, num_layers=2).items():
        for step in pipelines.LOWERED:
            graph, report = apply(step, graph)
            check_idempotent(step, graph)
            if report.name == "lower":
                assert report.num_matches == NUM_LOWERED[place]


def test_in_exact_mode_no_pass_finds_anything_to_name(tmp_path):
    for graph in aten_pieces(tmp_path, dtype=torch.bfloat16, exact=True, num_layers=2).values():
        reports = pipeline.rewrite(graph, pipeline.select(None, "exact")).reports
        assert not [report for report in reports if report.num_matches and report.name != "canonicalise"]
