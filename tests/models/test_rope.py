"""Rotary frequencies and tables against transformers' own functions."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lamina.common.errors import ConfigError, UnsupportedError
from lamina.models.config import ModelConfig
from lamina.models.rope import inverse_frequencies, rope_tables
from lamina.models.rope_config import RopeConfig

SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.0},
    {**LLAMA3, "original_max_position_embeddings": 64},
    YARN,
    {**YARN, "truncate": False},
    {**YARN, "attention_factor": 1.5},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
]


def ours(rope: dict[str, Any], **sizes: Any) -> ModelConfig:
    return ModelConfig.from_dict({**SIZES, **sizes, "rope_parameters": rope})


def theirs(rope: dict[str, Any], seq_len: int, **sizes: Any) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(**{**SIZES, **sizes}, rope_parameters=dict(rope))
    if rope["rope_type"] == "default":
        frequencies, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu", seq_len=seq_len)
    return frequencies, factor


@pytest.mark.parametrize("max_model_len", [100, 256, 1000])
@pytest.mark.parametrize("rope", SCALINGS, ids=str)
def test_frequencies_are_bitwise_those_of_transformers(rope: dict[str, Any], max_model_len: int) -> None:
    rope = {**rope, "rope_theta": 50000.0}
    frequencies, factor = inverse_frequencies(ours(rope), max_model_len)
    expected, expected_factor = theirs(rope, max_model_len)
    assert torch.equal(frequencies, expected)
    assert factor == expected_factor


@given(
    rope=st.sampled_from(SCALINGS),
    theta=st.floats(1e3, 1e7),
    head_dim=st.sampled_from([4, 16, 64, 96, 128]),
    context=st.sampled_from([256, 4096, 131072]),
)
def test_frequencies_are_those_of_transformers_for_any_theta(
    rope: dict[str, Any], theta: float, head_dim: int, context: int
) -> None:
    rope, sizes = {**rope, "rope_theta": theta}, {"head_dim": head_dim, "max_position_embeddings": context}
    frequencies, _ = inverse_frequencies(ours(rope, **sizes), 2 * context)
    assert torch.equal(frequencies, theirs(rope, 2 * context, **sizes)[0])


def test_dynamic_scaling_changes_nothing_up_to_the_trained_length() -> None:
    scaled, plain = ours({"rope_type": "dynamic", "factor": 2.0}), ours({"rope_type": "default"})
    assert torch.equal(inverse_frequencies(scaled, 256)[0], inverse_frequencies(plain, 256)[0])
    assert not torch.equal(inverse_frequencies(scaled, 257)[0], inverse_frequencies(plain, 257)[0])


def test_tables_of_a_bfloat16_model_are_the_float32_ones() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = ours(rope, max_position_embeddings=4096)
    cos, sin = rope_tables(config, max_model_len=4096, dtype=torch.bfloat16, device="cpu")
    reference = LlamaRotaryEmbedding(
        LlamaConfig(**{**SIZES, "max_position_embeddings": 4096}, rope_parameters=rope)
    )
    expected_cos, expected_sin = reference(torch.zeros(1), torch.arange(4096)[None])
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos, expected_cos[0, :, :8], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, expected_sin[0, :, :8], rtol=0, atol=1e-6)


def test_tables_reach_as_far_as_the_longest_sequence() -> None:
    config = ours({"rope_type": "default"})
    shapes = [
        rope_tables(config, max_model_len=n, dtype=torch.float32, device="cpu")[0].shape for n in (10, 999)
    ]
    assert shapes == [(256, 8), (999, 8)]


def test_tables_of_a_float64_model_are_float64() -> None:
    cos, _ = rope_tables(ours({"rope_type": "default"}), max_model_len=1, dtype=torch.float64, device="cpu")
    assert cos.dtype == torch.float64


def test_yarn_scales_its_tables_by_the_attention_factor() -> None:
    cos, _ = rope_tables(
        ours({**YARN, "attention_factor": 1.5}), max_model_len=1, dtype=torch.float32, device="cpu"
    )
    assert cos[0].tolist() == [1.5] * 8


def test_both_places_of_rope_settings_mean_the_same() -> None:
    scaling = {**LLAMA3, "original_max_position_embeddings": 64}
    old = ModelConfig.from_dict({**SIZES, "rope_theta": 5e5, "rope_scaling": scaling})
    assert old == ours({**scaling, "rope_theta": 5e5})


@pytest.mark.parametrize(
    "places",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": None},
        {"rope_parameters": {"rope_theta": None}, "rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4},
    ],
    ids=str,
)
def test_theta_is_found_wherever_it_is(places: dict[str, Any]) -> None:
    assert ModelConfig.from_dict({**SIZES, **places}).rope.theta == 5e5


def test_rope_scaling_that_is_null_is_the_default_rope() -> None:
    assert ModelConfig.from_dict({**SIZES, "rope_theta": 5e5, "rope_scaling": None}).rope == RopeConfig(
        theta=5e5
    )


def test_the_old_name_type_is_read() -> None:
    config = ModelConfig.from_dict({**SIZES, "rope_scaling": {"type": "linear", "factor": 2}})
    assert config.rope == RopeConfig(rope_type="linear", factor=2.0)


def test_rope_type_wins_over_type_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    scaling = {**LLAMA3, "type": "yarn", "original_max_position_embeddings": 64}
    for _ in range(2):
        assert ModelConfig.from_dict({**SIZES, "rope_scaling": scaling}).rope.rope_type == "llama3"
    assert [record.message.count("'yarn'") for record in caplog.records] == [1]


def test_an_unknown_rope_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match=r"'extended'.*default, linear, dynamic, llama3, yarn"):
        ModelConfig.from_dict({**SIZES, "rope_scaling": {"rope_type": "extended", "factor": 8}})


def test_an_original_length_beside_the_rope_settings_wins_as_in_transformers() -> None:
    config = ModelConfig.from_dict(
        {
            **SIZES,
            "original_max_position_embeddings": 32,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        }
    )
    assert config.rope.original_max_position_embeddings == 32


def test_yarn_without_a_factor_takes_it_from_the_lengths() -> None:
    assert ours({**YARN, "factor": None}).rope.factor == 4.0


@pytest.mark.parametrize(
    "rope, message",
    [
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor is 0.5; wanted a number >= 1"),
        ({"rope_type": "linear", "factor": "2"}, "factor is '2'; wanted a number"),
        ({"rope_type": "llama3", "factor": 8.0}, "needs low_freq_factor"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "wanted 0 < low < high"),
        ({"rope_theta": 0}, "rope_theta is 0; wanted a number > 0"),
    ],
)
def test_a_bad_rope_setting_is_named(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ours(rope)


@pytest.mark.parametrize(
    "rope", [{"rope_type": "default", "rope_theta": 1e-300}, {**YARN, "rope_theta": 1}], ids=str
)
def test_a_rope_without_finite_angles_is_refused(rope: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"rope is .*theta=.*wanted one with finite angles"):
        inverse_frequencies(ours(rope), 256)


def test_more_positions_than_there_is_memory_for_are_refused() -> None:
    config = ours({"rope_type": "default"}, max_position_embeddings=1 << 24, head_dim=1 << 24)
    with pytest.raises(ConfigError, match="max_position_embeddings is 16777216; wanted rotations that fit"):
        rope_tables(config, max_model_len=1, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    "rope", [{"partial_rotary_factor": 0.5}, {"full_attention": {"rope_type": "default"}}], ids=str
)
def test_a_rope_that_is_not_done_is_refused(rope: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="which Lamina does not do"):
        ours(rope)
