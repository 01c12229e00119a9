"""Reading config.json and generation_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig

from lamina.common.errors import ConfigError, LoadError, UnsupportedError
from lamina.models.config import ModelConfig, read_model_config
from lamina.models.generation_config import GenerationDefaults, read_generation_config

SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({**SIZES, **changes})


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    LlamaConfig(
        **SIZES
        | {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True, "dtype": "bfloat16"},
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        attention_bias=True,
        mlp_bias=True,
        eos_token_id=[2, 7],
    ).save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 32)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-5, 512)
    assert (config.attention_bias, config.mlp_bias, config.tie_word_embeddings) == (True, True, True)
    assert (config.dtype, config.bos_token_id, config.eos_token_ids) == (torch.bfloat16, 1, (2, 7))


def test_absent_fields_have_the_defaults_of_transformers() -> None:
    ours, theirs = read(), LlamaConfig(**SIZES)
    assert (ours.num_kv_heads, ours.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert (ours.rms_norm_eps, ours.hidden_act) == (theirs.rms_norm_eps, theirs.hidden_act)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.dtype == torch.float32


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16"])
def test_every_spelling_of_the_dtype_is_read(field: str, name: str) -> None:
    assert read(**{field: name}).dtype == torch.bfloat16


def test_the_architecture_follows_from_model_type_where_it_is_absent() -> None:
    assert read(architectures=None, model_type="llama").architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_size": "64"}, r"config\.json: hidden_size is '64'; wanted an integer >= 1"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; wanted an integer >= 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_attention_heads": 5}, "head_dim is None; wanted a number, since num_attention_heads 5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; wanted a divisor of num_attention_heads 4"),
        ({"head_dim": 15}, "head_dim is 15; wanted an even number"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05; wanted a number >= 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"attention_bias": 1}, "attention_bias is 1; wanted true or false"),
        ({"torch_dtype": "int4"}, "dtype is 'int4'; wanted one of float32, bfloat16"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; wanted a token id"),
        ({"eos_token_id": [2, -1]}, "eos_token_id is"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; wanted an object"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'; wanted a list"),
        ({"architectures": None}, "architectures is None"),
        ({"vocab_size": 2**40}, "vocab_size is 1099511627776; wanted an integer >= 1, <= 2147483647"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; wanted an integer >= 1, <= 10000"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000000"),
        ({"eos_token_id": 2**31}, "eos_token_id is 2147483648; wanted a token id"),
    ],
    ids=str,
)
def test_a_bad_field_is_named_with_its_value_and_what_was_wanted(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 4096},
        {"hidden_act": "gelu"},
        {"num_local_experts": 8},
        {"logits_scaling": 8.0},
        {"rope_interleaved": True},
    ],
    ids=str,
)
def test_what_changes_the_arithmetic_is_refused_by_name(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(UnsupportedError, match=name):
        read(**changes)


def test_fields_that_change_nothing_are_passed_over() -> None:
    neutral = {"pretraining_tp": 2, "sliding_window": None, "use_cache": False, "attention_dropout": 0.1}
    assert read(**neutral, rope_interleaved=False, initializer_range=0.02) == read()


@pytest.mark.parametrize(
    "changes", [{"novelty": 2}, {"rope_parameters": {"rope_type": "default", "novelty": 2}}], ids=str
)
def test_a_field_of_which_nothing_is_known_is_named_in_a_warning(
    changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = ModelConfig.from_dict({**SIZES, **changes}, origin=f"config with {sorted(changes)}")
    assert config == read()
    (record,) = caplog.records
    assert record.message.endswith("what Lamina does not know is passed over: novelty")


def test_an_unknown_architecture_is_refused_before_anything_else_is_read() -> None:
    with pytest.raises(
        UnsupportedError, match=r"'OtherForCausalLM' is not known; known are.*LlamaForCausalLM"
    ):
        ModelConfig.from_dict({"architectures": ["OtherForCausalLM"]})


def test_unknown_keywords_are_type_errors() -> None:
    with pytest.raises(TypeError, match="num_head"):
        ModelConfig(architecture="LlamaForCausalLM", num_head=4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "\xff", "[" * 100_000],
    ids=["empty", "cut short", "a list", "no text", "nested without end"],
)
def test_a_config_that_is_no_json_object_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(LoadError, match=r"config\.json"):
        read_model_config(tmp_path)


def test_a_folder_without_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"has no config\.json"):
        read_model_config(tmp_path)


def test_generation_defaults_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    sampling = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.8}
    sampling |= {"repetition_penalty": 1.05}
    GenerationConfig(do_sample=True, eos_token_id=[2, 7], **sampling).save_pretrained(tmp_path)
    expected = GenerationDefaults(eos_token_ids=(2, 7), **sampling)
    assert read_generation_config(tmp_path) == expected


def test_no_generation_config_means_no_defaults(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == GenerationDefaults()


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -1),
        ("temperature", 1e39),
        ("repetition_penalty", 1e-38),
        ("top_k", 0.5),
        ("top_p", "1"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("min_p", 2),
        ("typical_p", 0),
        ("repetition_penalty", 0),
        ("eos_token_id", "x"),
    ],
)
def test_a_bad_generation_default_is_named(tmp_path: Path, field: str, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {field} is "):
        read_generation_config(tmp_path)
