"""Every family against transformers, on plain dense attention; and what a fault in one of them would do."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lamina.common.errors import ConfigError, UnsupportedError
from lamina.models import AttentionSpec, find_model
from lamina.models.config import ModelConfig
from lamina.models.families.gemma2 import rounded
from lamina.models.layers import EXACT_OPS, FAST_OPS, Ops
from lamina.models.rope_config import RopeConfig

from ...families import CHUNK, FAMILIES, SIZES, WINDOW, oracle, oracle_logits

Logits = Callable[..., Tensor]
PROMPT = [(37 * i) % 317 + 3 for i in range(24)]
every_family = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = FAMILIES[name].save(tmp_path_factory.mktemp(name))
        return made[name]

    return make


class Answers(NamedTuple):
    """What transformers computes of a prompt, in each of these dtypes."""

    float64: Tensor
    float32: Tensor
    bfloat16: Tensor


@pytest.fixture(scope="module")
def expected(folder_of: Callable[[str], Path]) -> Callable[[str], Answers]:
    made: dict[str, Answers] = {}

    def run(name: str) -> Answers:
        if name not in made:
            model = oracle(folder_of(name), FAMILIES[name].architecture)
            dtypes = (torch.float32, torch.float64, torch.bfloat16)  # widened before it is narrowed
            narrow, wide, half = (oracle_logits(model.to(dtype), PROMPT) for dtype in dtypes)
            made[name] = Answers(float64=wide, float32=narrow, bfloat16=half)
        return made[name]

    return run


def check(ours: Tensor, theirs: Answers) -> None:
    """Against float64 we err at most twice as much as transformers does in the same dtype, squares summed."""
    naive = {torch.float32: theirs.float32, torch.bfloat16: theirs.bfloat16}[ours.dtype]
    error, allowed = (
        float((logits.double() - theirs.float64).square().mean().sqrt()) for logits in (ours, naive)
    )
    assert error <= 2 * allowed, f"off by {error:.3g}, where transformers is off by {allowed:.3g}"


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ops", [FAST_OPS, EXACT_OPS], ids=["fast", "exact"])
def test_logits_err_at_most_twice_as_much_as_those_of_transformers(
    name: str, ops: Ops, dtype: torch.dtype, folder_of: Any, expected: Any, logits_of: Logits
) -> None:
    check(logits_of(folder_of(name), PROMPT, ops=ops, dtype=dtype), expected(name))


@every_family
def test_one_file_and_several_with_an_index_hold_the_same_model(
    name: str, folder_of: Any, logits_of: Logits, tmp_path: Path
) -> None:
    FAMILIES[name].save(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 == len(list(folder_of(name).glob("*.safetensors")))
    assert torch.equal(logits_of(tmp_path, PROMPT), logits_of(folder_of(name), PROMPT))


def _without_rotation(weights: dict[str, Tensor]) -> None:
    weights["rope_cos"].fill_(1.0)
    weights["rope_sin"].fill_(0.0)


def _without_head_norms(weights: dict[str, Tensor]) -> None:
    for name in [name for name in weights if name.endswith(("q_norm", "k_norm"))]:
        weights[name] = torch.ones_like(weights[name])


def _with_a_head_of_its_own(weights: dict[str, Tensor]) -> None:
    weights["lm_head"] = torch.randn_like(weights["lm_head"])


FAULTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "no rotary": ("qwen3", {"weight_changes": _without_rotation}),
    "another theta": ("mistral-full", {"config_changes": {"rope": RopeConfig(theta=20000.0)}}),
    "a window one too wide": ("mistral", {"config_changes": {"sliding_window": WINDOW + 1}}),
    "a window one too narrow": ("mistral", {"config_changes": {"sliding_window": WINDOW - 1}}),
    "chunks one too long": ("llama-chunks", {"config_changes": {"attention_chunk_size": CHUNK + 1}}),
    "no chunks": ("llama-chunks", {"config_changes": {"layer_types": ()}}),
    "no windows in the upper layers": ("qwen2-windows", {"config_changes": {"layer_types": ()}}),
    "no norm of heads": ("qwen3", {"weight_changes": _without_head_norms}),
    "no soft cap on scores": ("gemma2", {"config_changes": {"attention_soft_cap": None}}),
    "no soft cap on logits": ("gemma2", {"config_changes": {"logits_soft_cap": None}}),
    "the scale of the head's size": ("gemma2", {"config_changes": {"attention_scale": None}}),
    "embeddings as they are": ("gemma2", {"config_changes": {"embedding_scale": 1.0}}),
    "SiLU for GELU": ("gemma2", {"config_changes": {"hidden_act": "silu"}}),
    "one rope for both kinds": ("gemma3", {"config_changes": {"sliding_rope": RopeConfig(theta=1e6)}}),
    "a tied head that is another": ("qwen3-tied", {"weight_changes": _with_a_head_of_its_own}),
    "the long divisors": ("phi3-longrope", {"max_model_len": 129}),
    "what is added as it is": ("granite", {"config_changes": {"residual_scale": 1.0}}),
    "logits as they are": ("granite", {"config_changes": {"logits_divisor": 1.0}}),
    "every layer rotated": ("smollm3", {"config_changes": {"rotated_layers": (True,) * 4}}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_would_show(fault: str, folder_of: Any, expected: Any, logits_of: Logits) -> None:
    name, changes = FAULTS[fault]
    logits = logits_of(folder_of(name), PROMPT, **changes)
    with pytest.raises(AssertionError, match="off by"):
        check(logits, expected(name))
    assert (logits - expected(name).float32).abs().max() > 1e-2, "and not by rounding"


def test_the_long_divisors_of_longrope_serve_what_may_grow_beyond_the_trained_length(
    folder_of: Any, logits_of: Logits
) -> None:
    """transformers decides by each prompt; here all positions of a server turn alike."""
    folder, long_prompt = folder_of("phi3-longrope"), [(37 * i) % 317 + 3 for i in range(140)]
    theirs = oracle_logits(oracle(folder, "Phi3ForCausalLM"), long_prompt)
    torch.testing.assert_close(logits_of(folder, long_prompt), theirs, rtol=1e-4, atol=1e-4)


MINIMAL = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@every_family
def test_an_absent_field_means_what_it_means_to_transformers(name: str) -> None:
    """Ours reads the few fields that every config.json has, and all those that transformers makes of them."""
    family = FAMILIES[name]
    few = {field: SIZES[field] for field in (*MINIMAL, "num_key_value_heads")} | {"head_dim": 16}
    written = type(family.config())(**few).to_dict()
    ours, theirs = (
        ModelConfig.from_dict({**values, "architectures": [family.architecture]}) for values in (few, written)
    )
    tokens: dict[str, Any] = {"bos_token_id": None, "eos_token_ids": ()}
    assert dataclasses.replace(ours, **tokens) == dataclasses.replace(theirs, **tokens)


@every_family
def test_every_field_that_transformers_writes_is_known(name: str, caplog: pytest.LogCaptureFixture) -> None:
    family = FAMILIES[name]
    ModelConfig.from_dict(family.config().to_dict(), origin=name)
    assert not [record.message for record in caplog.records]


@every_family
def test_the_architecture_follows_from_model_type(name: str) -> None:
    family = FAMILIES[name]
    values = {**family.config().to_dict(), "architectures": None}
    assert ModelConfig.from_dict(values).architecture == family.architecture


def read(name: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({**FAMILIES[name].config().to_dict(), **changes})


def windows(config: ModelConfig) -> list[int | None]:
    return [spec.window for spec in find_model(config.architecture).attention(config)]


def test_a_layer_is_attended_as_its_kind_says() -> None:
    config = read("gemma2")
    specs = find_model(config.architecture).attention(config)
    sliding = AttentionSpec(scale=24**-0.5, window=WINDOW, soft_cap=5.0)
    assert specs == (sliding, dataclasses.replace(sliding, window=None)) * 2


def test_a_layer_of_chunks_sees_no_more_than_one() -> None:
    config = read("llama-chunks")
    specs = find_model(config.architecture).attention(config)
    assert [spec.chunk for spec in specs] == [CHUNK, CHUNK, None, CHUNK]
    assert [spec.reach for spec in specs] == [CHUNK, CHUNK, None, CHUNK]


def test_layer_types_win_over_the_rule_of_a_family() -> None:
    types = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    for name in ("mistral", "gemma2", "gemma3", "phi3"):
        assert windows(read(name, layer_types=types)) == [None, WINDOW, None, None]


def test_a_window_counts_for_qwen_only_where_it_is_switched_on() -> None:
    assert windows(read("qwen2")) == [None] * 4
    assert windows(read("qwen2-windows")) == [None, None, WINDOW, WINDOW]


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("mistral", {"layer_types": ["dilated_attention"] * 4}, "dilated_attention"),
        ("mistral", {"layer_types": ["chunked_attention"] * 4}, "attention_chunk_size is None"),
        ("llama-chunks", {"attention_chunk_size": 0}, "attention_chunk_size is 0; wanted an integer >= 1"),
        (
            "mistral",
            {"layer_types": ["full_attention"]},
            "layer_types has 1 entries; wanted one for each",
        ),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0; wanted an integer >= 1"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "sliding_window is None"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window is 1; wanted true or false"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_act is 'gelu'"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("granite", {"residual_multiplier": "1"}, "residual_multiplier is '1'; wanted a number"),
        ("granite", {"embedding_multiplier": None, "sliding_window": 8}, "sliding_window is 8"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers is .*wanted 0 or 1 for each of 4 layers"),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers is"),
        ("phi3-longrope", {"rope_parameters": {"rope_type": "longrope"}}, "short_factor has 0 numbers"),
        ("qwen3", {"rope_parameters": {"mrope_section": [2, 3, 3]}}, "mrope_section"),
    ],
)
def test_what_a_family_cannot_honour_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        read(name, **changes)


@pytest.mark.parametrize("old", ["su", "yarn"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_the_old_names_of_longrope_are_read(key: str, old: str) -> None:
    rope = {**FAMILIES["phi3-longrope"].changes["rope_parameters"]}
    del rope["rope_type"]
    new = read("phi3-longrope")
    renamed = read("phi3-longrope", rope_parameters=None, rope_scaling={**rope, key: old})
    assert renamed == new


def test_the_scale_of_embeddings_is_one_of_the_dtype() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for value in (3072**0.5, 2304**0.5, 64**0.5, 1.0, 0.3):
            assert rounded(value, dtype) == torch.tensor(value, dtype=dtype).item()
