"""What the passes make of the families' pieces: every norm, sum and gate is a site, and none is missed."""

from pathlib import Path

import pytest
import torch

from lamina.compiler.passes import pipeline
from lamina.compiler.torch_internals import torch_compat
from lamina.models.rope_config import RopeConfig

from .. import pipelines
from .test_golden import all_pieces, op_list

GOLDEN = Path(__file__).parent / "pieces_of_families.txt"
GELU = "gelu_pytorch_tanh"
FAMILIES = {
    "Gemma2": {"hidden_act": GELU, "embedding_scale": 8.0},
    "Gemma3": {"hidden_act": GELU, "embedding_scale": 8.0, "sliding_rope": RopeConfig(theta=1e4)},
    "Granite": {"residual_scale": 0.5, "embedding_scale": 2.0},
    "Mistral": {},
    "Phi3": {"rope": RopeConfig(rotated_share=0.75)},
    "Qwen2": {"attention_bias": False},
    "Qwen3": {},
    "SmolLM3": {"rotated_layers": (True, False)},
}
NORMS = {"Gemma2": 4, "Gemma3": 6, "Qwen3": 4}  # of a layer; else two
NAMING = ("add_rms_norm", "rms_norm", "silu_and_mul", "gelu_and_mul")
UNNAMED = ("aten::rsqrt", "aten::exp", "aten::tanh", "aten::pow")  # left of a norm or a gate that is missed


@pytest.fixture(scope="module")
def pieces_of(tmp_path_factory):
    """pieces_of(family) -> the unique pieces of a model of two layers, in bfloat16."""
    made = {}

    def make(family):
        if family not in made:
            settings = {"architecture": f"{family}ForCausalLM", "num_layers": 2, **FAMILIES[family]}
            made[family] = all_pieces(tmp_path_factory.mktemp(family), dtype=torch.bfloat16, **settings)
        return made[family]

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_no_norm_sum_or_gate_of_a_family_is_missed(pieces_of, family):
    found = dict.fromkeys((*NAMING, "qk_norm", "add_rms_norm_linear"), 0)
    for graph in pieces_of(family):
        rewritten = pipeline.rewrite(graph, pipelines.PIPELINE[:-1])
        targets = [torch_compat.op_name(node.target) for node in rewritten.graph.nodes]
        assert not [target for target in targets if target in UNNAMED]
        for report in rewritten.reports:
            assert report.name not in NAMING or not report.skipped, report
            if report.name in found:
                found[report.name] += report.num_matches
    is_gemma, has_head_norms = family.startswith("Gemma"), family in ("Gemma3", "Qwen3")
    num_norms = 2 * NORMS.get(family, 2) + 1
    assert found["add_rms_norm"] + found["rms_norm"] == num_norms
    assert found["add_rms_norm"] == 4  # one behind attention and one behind the MLP of both layers
    assert found["gelu_and_mul" if is_gemma else "silu_and_mul"] == 2
    assert found["qk_norm"] == (2 if has_head_norms else 0)
    assert found["add_rms_norm_linear"] == (0 if is_gemma else 3)


def test_pieces_are_what_the_file_says(pieces_of):
    """Changed on purpose: raise the version of the pass, and put the printed text into the file."""
    written = ""
    for family in ("Gemma2", "Gemma3", "Qwen3"):
        for number, graph in enumerate(pieces_of(family)):
            on_a_gpu = pipeline.rewrite(graph, pipelines.PIPELINE[:-1]).graph
            written += f"{family}, piece {number}, as on a GPU\n{op_list(on_a_gpu)}"
    print(written)
    assert written == GOLDEN.read_text()
