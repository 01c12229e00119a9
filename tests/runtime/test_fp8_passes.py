"""A model in FP8 whose norms and gates quantize, as passes have it on a GPU, through the whole runtime."""

import pytest

from lamina import SamplingParams
from lamina.compiler.passes import providers

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5], [1, 2, 3], list(range(40, 70))]
TAKEN = dict.fromkeys(("rms_norm_quantized", "act_and_mul_quantized"), providers.NARROW)


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    """Plans that are of no other test: their keys do not know that the choice below is made up."""
    return tmp_path_factory.mktemp("fp8-passes")


def answers(runtime):
    return [list(output.outputs[0].token_ids) for output in runtime.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("quantization", ["fp8", "fp8_block"])
def test_what_is_compiled_so_answers_as_the_model_run_eagerly(
    open_runtime, own_cache, monkeypatch, quantization
):
    """By the same formulas: where an activation is quantized changes none of its bits."""
    monkeypatch.setitem(providers.TAKEN, "cpu", {**providers.TAKEN["cpu"], **TAKEN})
    settings = {"dtype": "bfloat16", "quantization": quantization, "cache_dir": own_cache}
    eager = answers(open_runtime(**settings, compile=False))
    compiled = open_runtime(**settings, compile=True)
    text = compiled.explain()
    assert "pass rms_norm_quantized: 2 sites" in text
    assert "pass act_and_mul_quantized: 1 sites" in text
    assert answers(compiled) == eager
