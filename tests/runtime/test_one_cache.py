"""One cache for all settings: whatever was compiled before, what is served is what was asked for."""

import pytest

from lamina import Runtime, SamplingParams

pytestmark = pytest.mark.timeout(600)
PROMPT = [5, 17, 300, 4, 4, 90]
REPORTED = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=20)
SETTINGS = {"device": "cpu", "dtype": "float32"}
# What differs from TINY as it is: in its config.json, or in what is asked of the runtime.
CHANGES = {
    "rope": ({"rope_theta": 50.0}, {}),
    "layers": ({"num_hidden_layers": 3}, {}),
    "key heads": ({"num_key_value_heads": 4}, {}),
    "tied": ({"tie_word_embeddings": True}, {}),
    "quantization": ({}, {"quantization": "int8"}),
    "context": ({}, {"max_model_len": 64}),
    "batch": ({}, {"max_num_seqs": 3, "block_size": 4}),
}


def logprobs(folder, **settings):
    """The log-probabilities of two tokens and their rivals, and the figures of the compiler."""
    with Runtime.from_pretrained(folder, **SETTINGS | settings) as runtime:
        (output,) = runtime.generate([PROMPT], REPORTED)
        rows = output.outputs[0].logprobs
        return [{id_: one.logprob for id_, one in row.items()} for row in rows], runtime.stats()["compile"]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_is_served_as_asked_and_the_way_back_compiles_nothing(
    make_tiny_folder, compile_cache, change
):
    config, settings = CHANGES[change]
    usual, _ = logprobs(make_tiny_folder(), cache_dir=compile_cache)
    folder = make_tiny_folder(**config)
    found, _ = logprobs(folder, cache_dir=compile_cache, **settings)
    wanted, _ = logprobs(folder, cache_dir=compile_cache, compile=False, **settings)
    assert found[0].keys() == wanted[0].keys()
    for id_, one in wanted[0].items():
        assert found[0][id_] == pytest.approx(one, abs=1e-3)
    if config or "quantization" in settings:
        assert found != usual, "the change changed nothing"
    again, figures = logprobs(make_tiny_folder(), cache_dir=compile_cache)
    assert (again, figures["compiled"]) == (usual, 0)
