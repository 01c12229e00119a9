"""Equal text means equal computation, in every process; whatever differs shows."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx

from lamina.common.errors import CompileError
from lamina.compiler.capture.fingerprint import canonical_text, fingerprint, group_equal
from lamina.compiler.compile import piece_graphs
from lamina.compiler.passes import pipeline
from lamina.testing import Program, Step, trace

from ..tiny import make_tiny

ROOT = Path(__file__).resolve().parent.parent.parent.parent


@functools.cache
def texts(**changes):
    return [canonical_text(graph) for graph in piece_graphs(make_tiny(**changes).program)]


def test_texts_are_equal_in_processes_that_hash_otherwise():
    """Another process's are those of this one."""
    code = (
        "import json; from tests.compiler.capture.test_fingerprint import texts; print(json.dumps(texts()))"
    )
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    threads = str(torch.get_num_threads() + 1)
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": paths, "OMP_NUM_THREADS": threads}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == texts()


def test_text_holds_no_address_path_or_weight_name():
    for text in texts():
        assert "0x" not in text
        assert "/" not in text
        assert "layers." not in text
        assert "input_norm" not in text


def test_depth_changes_no_text():
    assert texts(num_layers=2) == texts(num_layers=5)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.bfloat16},
        {"rms_norm_eps": 1e-6},
        {"num_heads": 2, "num_kv_heads": 2},
        {"num_kv_heads": 1},
        {"intermediate_size": 96},
        {"attention_bias": True},
        {"exact": True},
    ],
    ids=str,
)
def test_what_changes_the_computation_changes_the_middle_piece(changes):
    assert texts(**changes)[1] != texts()[1]


def test_order_of_operands_strides_and_constants_show():
    def graph_of(function, value):
        graph = fx.Graph()
        inputs = [graph.placeholder(name) for name in "xy"]
        for node in inputs:
            node.meta["val"] = value
        graph.output(graph.call_function(*function(*inputs)))
        return graph

    row, column = torch.empty(4, 4), torch.empty(4, 4).t()
    sub = torch.ops.aten.sub.Tensor
    graphs = [
        graph_of(lambda x, y: (sub, (x, y)), row),
        graph_of(lambda x, y: (sub, (y, x)), row),
        graph_of(lambda x, y: (sub, (x, y)), column),
        graph_of(lambda x, y: (sub, (x, 1)), row),
        graph_of(lambda x, y: (sub, (x, 1.0)), row),
        graph_of(lambda x, y: (sub, (x, True)), row),
        graph_of(lambda x, y: (sub, (x, y), {"alpha": 2}), row),
        graph_of(lambda x, y: (torch.ops.aten.add.Tensor, (x, y)), row),
    ]
    all_texts = [canonical_text(graph) for graph in graphs]
    assert group_equal(all_texts) == list(range(len(graphs)))
    assert len({fingerprint(text) for text in all_texts}) == len(graphs)


def test_names_of_nodes_and_of_symbols_do_not_show():
    steps = (Step(kind="add_norm", eps=1e-5), Step(kind="mlp", eps=1e-5))
    program = Program(steps=steps, dtype=torch.float32, hidden=8, intermediate=3, scale=1.0, seed=0)
    graph = trace(program).graph
    copy, _ = pipeline.PIPELINE[0].run(graph)
    for number, node in enumerate(copy.nodes):
        node.name = f"renamed_{number}"
    assert canonical_text(copy) == canonical_text(pipeline.PIPELINE[0].run(graph)[0])
    other = trace(Program(steps=steps, dtype=torch.float32, hidden=8, intermediate=3, scale=1.0, seed=1))
    assert canonical_text(other.graph) == canonical_text(graph)


def test_a_tensor_among_the_arguments_is_refused():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.add, (x, torch.ones(2))))
    with pytest.raises(CompileError, match=r"tensor constant .* from its weights"):
        canonical_text(graph)
