"""Steps with adapters: which ops the pieces of a model come to on a GPU."""

import pytest
import torch

from lamina.common.progress import say_nothing
from lamina.compiler.passes import batch_invariant, lower, pipeline
from lamina.compiler.passes.graph import copy_graph
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.startup.loader import resolve_runtime

from .. import pipelines
from .test_golden import op_list, pieces_of

OPS = torch.ops.lamina


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


def on_a_gpu(graph, choose=pipelines.taken):
    return lower.run(pipeline.rewrite(graph, pipelines.PIPELINE[:-1]).graph, choose=choose)


def test_a_layer_with_adapters_is_ops_alone_on_a_gpu(pieces):
    """Each of which begins before what it reads is there: behind generated code none does."""
    projection = "linear_lora"
    layer = [projection, "add_rms_norm", projection, "silu_and_mul", projection, "add_rms_norm"]
    wanted = [["rms_norm", projection], [*layer, projection], layer[:-1]]
    for graph, calls in zip(pieces, wanted, strict=True):
        lowered, report = on_a_gpu(graph)
        assert lamina_ops(lowered)[: len(calls)] == calls
        assert all("loads its weights" in text for text in report.skipped)


@pytest.mark.parametrize(
    ("quantization", "gemm"), [("fp8", "linear_w8a8"), ("w4a16", "linear_w4a16"), ("int8", "linear_int8")]
)
def test_quantized_projections_are_followed_by_the_same(quantization, gemm, tiny_folder, tmp_path):
    _, middle, _ = adapted_pieces(tiny_folder, tmp_path, quantization=quantization)
    found = lamina_ops(on_a_gpu(middle)[0])
    projection = [gemm, "lora"]
    assert found[:8] == [*projection, "add_rms_norm", *projection, "silu_and_mul", *projection]


def test_a_norm_or_gate_ahead_of_adapters_keeps_its_kernel_where_those_have_one(pieces):
    for graph, ahead in zip(pieces, ({"rms_norm"}, {"add_rms_norm", "silu_and_mul"}), strict=False):
        assert ahead <= set(lamina_ops(on_a_gpu(graph)[0]))
        assert not ahead & set(lamina_ops(on_a_gpu(graph, pipelines.left)[0]))


def without(*names):
    return [step for step in pipelines.PIPELINE[:-1] if step.name not in names]


def test_adapters_of_what_others_read_too_or_of_another_input_stay_apart(pieces):
    graph = copy_graph(pipeline.rewrite(pieces[1], without("linear_lora")).graph)
    first, second, *rest = graph.find_nodes(op="call_function", target=OPS.lora.default)
    second.args = (second.args[0], graph.call_function(torch.clone, (second.args[1],)), *second.args[2:])
    second.args[1].meta["val"] = second.all_input_nodes[0].meta["val"]
    second.prepend(second.args[1])
    output = graph.output_node()
    output.args = ((*output.args[0], first.args[0]),)
    joined, report = pipelines.LINEAR_LORA.run(graph)
    left = joined.find_nodes(op="call_function", target=OPS.lora.default)
    assert [node.name for node in left] == [first.name, second.name]
    assert report.num_matches == len(rest)
    assert report.skipped == (f"{first.name}: others read the projection too",)


def test_batch_invariance_and_bias_reach_the_op_that_joins_both(pieces):
    graph = pipeline.rewrite(pieces[1], without("linear_lora")).graph
    apart = batch_invariant.BATCH_INVARIANT.run(graph)[0]
    late, early = (
        step_behind.run(step.run(start)[0])[0]
        for start, step, step_behind in (
            (graph, pipelines.LINEAR_LORA, batch_invariant.BATCH_INVARIANT),
            (apart, batch_invariant.BATCH_INVARIANT, pipelines.LINEAR_LORA),
        )
    )
    for joined in (late, early):
        ops = joined.find_nodes(op="call_function", target=OPS.linear_lora.default)
        assert [node.args[8] for node in ops] == [True] * 4
