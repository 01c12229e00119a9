"""The compiled model against itself run op by op and against transformers, as `lamina verify` shows it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from lamina import CompileConfig, ConfigError, LogitsError, RequestError
from lamina.cli import app
from lamina.common.progress import say_nothing
from lamina.compiler.passes.graph import Pass, PassReport, copy_graph
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.verify import verify

pytestmark = pytest.mark.timeout(600)
IDS = [1, 17, 45, 99, 300, 7]


def lose_the_gate(graph):
    """A faulty pass: SiLU of everything is its double."""
    graph = copy_graph(graph)
    sites = [node for node in graph.nodes if node.target is torch.ops.lamina.silu_and_mul.default]
    for node in sites:
        with graph.inserting_before(node):
            doubled = graph.call_function(torch.ops.aten.mul.Tensor, (node.args[0], 2.0))
        doubled.meta = dict(node.args[0].meta)
        node.args = (doubled,)
    return graph, PassReport(name="lose_the_gate", num_matches=len(sites))


FAULTY = Pass(name="lose_the_gate", version=1, reason="to be found", contract="none", run=lose_the_gate)


def config(folder, cache, **settings):
    return RuntimeConfig(model=folder, device="cpu", cache_dir=cache, **settings)


def test_rounding_explains_everything_and_each_layer_has_its_errors(tiny_text_folder, compile_cache):
    found = verify(config(tiny_text_folder, compile_cache), ["hello the world", IDS], 2, say_nothing)
    assert found.is_right
    assert (found.reference, found.culprit, found.first_wrong) == ("transformers", None, None)
    assert [row.layer for row in found.layers] == [0, 1, -1]
    assert all(row.compiled.rms < 1e-5 and row.eager.rms < 1e-5 for row in found.layers)
    assert len(found.pieces) == 3
    assert found.prompts[1][: len(IDS)] == tuple(IDS)
    assert len(found.prompts[1]) == len(IDS) + 2
    assert not found.differences


def test_a_faulty_pass_is_named_with_the_first_piece_that_differs(tiny_folder, compile_cache):
    faulty = CompileConfig(passes=("add_rms_norm", "silu_and_mul", FAULTY, "lower"), verify=False)
    found = verify(config(tiny_folder, compile_cache, compile=faulty), [IDS], 0, say_nothing)
    assert not found.is_right
    assert found.first_wrong == 1, "the first piece has no MLP"
    assert (found.culprit.name, found.culprit.is_pass) == ("lose_the_gate", True)
    assert [row.is_right for row in found.layers] == [True, False, False]
    assert found.differences
    assert all(one.eager == one.transformers != one.compiled and one.margin > 0 for one in found.differences)


@pytest.mark.parametrize(
    "name, value, place",
    [
        (
            "model.layers.0.mlp.down_proj.weight",
            torch.nan,
            r"queries, keys or values of layer 1 .*layers\.0\.down",
        ),
        (
            "model.layers.0.self_attn.q_proj.weight",
            torch.inf,
            r"queries, keys or values of layer 0 .*layers\.0\.q",
        ),
        ("model.layers.1.mlp.up_proj.weight", torch.nan, r"the logits .*layers\.1\.gate_up"),
        ("model.layers.1.self_attn.o_proj.weight", 3e38, r"the logits .* beyond torch\.float32"),
    ],
)
def test_the_first_layer_that_is_not_finite_is_named_and_nothing_compared(
    tiny_folder, tmp_path, compile_cache, name, value, place
):
    folder = shutil.copytree(tiny_folder, tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights[name][:] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LogitsError, match=f"^{place}"):
        verify(config(folder, compile_cache), [IDS], 0, say_nothing)


def test_without_anything_to_compare_it_says_so(tiny_folder, compile_cache):
    with pytest.raises(ConfigError, match="anything to verify"):
        verify(config(tiny_folder, compile_cache, compile=False), [IDS], 0, say_nothing)
    with pytest.raises(RequestError, match="needs a tokenizer"):
        verify(config(tiny_folder, compile_cache), ["text"], 0, say_nothing)


def test_the_command_prints_a_table_or_json_and_leaves_passes_out(tiny_folder, compile_cache):
    command = ["verify", str(tiny_folder), "--device", "cpu", "--cache-dir", str(compile_cache)]
    shown = CliRunner().invoke(app, [*command, "--max-tokens", "0"])
    assert shown.exit_code == 0, shown.output
    assert "right: rounding explains every difference" in shown.stdout
    document = json.loads(CliRunner().invoke(app, [*command, "--max-tokens", "0", "--json"]).stdout)
    assert document["is_right"] is True
    assert document["layers"][0]["compiled"]["rms"] < 1e-5
    refused = CliRunner().invoke(app, [*command, "--without-pass", "nonsense"])
    assert isinstance(refused.exception, ConfigError)
