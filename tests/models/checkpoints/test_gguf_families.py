"""GGUF files of every family, written as llama.cpp's converter writes them, against their checkpoints."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lamina.common.errors import ConfigError, UnsupportedError
from lamina.common.store import Store
from lamina.models.checkpoints.gguf import convert_gguf
from lamina.models.checkpoints.gguf_config import FAMILIES as GGUF_FAMILIES
from lamina.models.config import read_model_config

from ...families import FAMILIES, LONGROPE

PROMPT = [(37 * i) % 317 + 3 for i in range(24)]
ARCHITECTURES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
# Of each file the family it is written from, with what a file of that family can say.
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": (
        "gemma3",
        {"query_pre_attn_scalar": 16, "layer_types": None, "num_hidden_layers": 7},
    ),
    "phi3": ("phi3-longrope", {}),
    "granite": ("granite", {"attention_bias": False, "mlp_bias": False}),
    "smollm3": ("smollm3", {"tie_word_embeddings": True}),
}


def write_gguf(
    path: Path,
    folder: Path,
    architecture: str,
    changes: dict[str, Any] | None = None,
    raw: dict[str, tuple[np.ndarray[Any, Any], gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    """Names of tensors and of metadata are the gguf package's own."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if architecture != "phi3":
        writer.add_key_length(config.get("head_dim") or config["hidden_size"] // heads)
    METADATA.get(architecture, lambda writer, config: None)(writer, config)
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    for name, value in (changes or {}).items():
        writer.add_uint32(name, value)
    for name, values in _tensors(folder, architecture, config):
        content, kind = (raw or {}).get(name, (values, None))
        writer.add_tensor(name, content, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _llama(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_sliding_window(config["sliding_window"])


def _gemma2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _gemma3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(config["rope_parameters"]["full_attention"]["factor"])


def _phi3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(head_dim * LONGROPE["partial_rotary_factor"]))
    writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    writer.add_sliding_window(0)
    for kind in ("short", "long"):
        divisors = np.array(LONGROPE[f"{kind}_factor"], dtype=np.float32)
        writer.add_tensor(f"rope_factors_{kind}.weight", divisors)


def _granite(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


METADATA: dict[str, Callable[[gguf.GGUFWriter, dict[str, Any]], None]] = {
    "llama": _llama,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "granite": _granite,
}


def _tensors(folder: Path, architecture: str, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config["num_hidden_layers"])
    interleaved = architecture in ("llama", "granite", "smollm3")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in load_file(folder / "model.safetensors").items():
        values, module = tensor.numpy(), name.split(".")[-2]
        if interleaved and module in heads:
            halves = values.reshape(heads[module], 2, -1, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        yield target, values


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_every_family_that_is_read_is_written_here() -> None:
    assert set(GGUF_FAMILIES) == set(WRITTEN)


@pytest.mark.parametrize("architecture", WRITTEN)
def test_a_converted_file_is_and_computes_what_its_source_does(
    architecture: str,
    tmp_path: Path,
    store: Store,
    logits_of: Callable[..., Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    name, changes = WRITTEN[architecture]
    source = FAMILIES[name].save(tmp_path / "source", **changes)
    path = write_gguf(tmp_path / f"{architecture}.gguf", source, architecture)
    folder = convert_gguf(path, store, dtype=torch.float32)
    torch.testing.assert_close(logits_of(folder, PROMPT), logits_of(source, PROMPT), rtol=1e-5, atol=1e-5)
    ours, theirs = read_model_config(folder), read_model_config(source)
    assert ours.sliding_layers == theirs.sliding_layers
    assert (ours.rope, ours.sliding_rope) == (theirs.rope, theirs.sliding_rope)
    assert (
        json.loads((folder / "config.json").read_text())["model_type"] == FAMILIES[name].config().model_type
    )
    assert not [record.message for record in caplog.records if "passed over" in record.message]


def test_the_largest_gemma_scales_by_the_width_that_its_heads_would_have(
    tmp_path: Path, store: Store
) -> None:
    sizes = {"num_hidden_layers": 46, "hidden_size": 64, "head_dim": 8, "intermediate_size": 8}
    source = FAMILIES["gemma2"].save(tmp_path / "source", **sizes)
    folder = convert_gguf(write_gguf(tmp_path / "a.gguf", source, "gemma2"), store, dtype=torch.bfloat16)
    assert read_model_config(folder).attention_scale == 16**-0.5


def test_metadata_of_which_nothing_is_known_is_mentioned(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    source = FAMILIES["qwen3"].save(tmp_path / "source")
    path = write_gguf(tmp_path / "a.gguf", source, "qwen3", {"qwen3.attention.novelty": 3})
    convert_gguf(path, store, dtype=torch.float32)
    said = [record.message for record in caplog.records if record.name.startswith("lamina")]
    assert [line.endswith("passed over: attention.novelty") for line in said] == [True]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"split.count": 2}, r"one of 2 parts .*split.count.*llama-gguf-split --merge"),
        ({"qwen3.expert_count": 8}, "expert_count above 1 is not supported"),
        ({"qwen3.rope.dimension_count": 8}, "rotates 8 of 32 dimensions"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, store: Store, changes: dict[str, int], message: str
) -> None:
    source = FAMILIES["qwen3"].save(tmp_path / "source")
    path = write_gguf(tmp_path / "a.gguf", source, "qwen3", changes)
    with pytest.raises(UnsupportedError, match=message):
        convert_gguf(path, store, dtype=torch.float32)


def test_more_heads_than_there_is_width_for_are_refused(tmp_path: Path, store: Store) -> None:
    source = FAMILIES["phi3-longrope"].save(tmp_path / "source")
    path = write_gguf(tmp_path / "a.gguf", source, "phi3")
    name = b"phi3.attention.head_count"
    few, many = (name + struct.pack("<II", 4, heads) for heads in (4, 255))  # 4: an integer of 32 bits
    content = path.read_bytes()
    assert few in content
    path.write_bytes(content.replace(few, many))
    with pytest.raises(ConfigError, match=r"num_attention_heads|partial_rotary_factor is"):
        convert_gguf(path, store, dtype=torch.float32)


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_what_the_gguf_package_makes_of_them(name: str, tmp_path: Path, store: Store) -> None:
    kind = gguf.GGMLQuantizationType[name]
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    source = FAMILIES["qwen3"].save(tmp_path / "source", intermediate_size=2 * elements)
    blocks = np.random.default_rng(0).integers(0, 256, (64, 2, num_bytes), dtype=np.uint8)
    for place in HALF_FLOATS[name]:  # the factors of a block, which as random bytes would be no numbers
        blocks[:, :, place : place + 2] = np.array([0.01], dtype=np.float16).view(np.uint8)
    rows = blocks.reshape(64, -1)
    path = write_gguf(tmp_path / "a.gguf", source, "qwen3", raw={"blk.0.ffn_down.weight": (rows, kind)})
    folder = convert_gguf(path, store, dtype=torch.float32)
    held = load_file(folder / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert held.shape == (64, 2 * elements)
    assert torch.equal(held, torch.from_numpy(gguf.dequantize(rows, kind)))


HALF_FLOATS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
