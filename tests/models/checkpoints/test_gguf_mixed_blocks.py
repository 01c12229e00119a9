"""GGUF files whose fused projections are in several kinds of blocks, as those of K-quant mixes are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.common.errors import UnsupportedError
from lamina.common.store import Store
from lamina.models.checkpoints.gguf import convert_gguf
from lamina.models.checkpoints.quantized.gguf_blocks import KEPT
from lamina.models.checkpoints.weights import dummy_weights, load_weights, read_checkpoint
from lamina.models.config import read_model_config
from lamina.models.registry import find_model
from lamina.models.sharding import sharding_of

from ...families import oracle, oracle_logits
from .test_gguf import KIND, PROMPT, Run, write_gguf
from .test_gguf_blocks import WIDE, relative_error, restored

Change = Callable[..., Path]
# Two layers as llama.cpp mixes Q4_K_M; the embedding is looked up, so it does not count.
Q4_K_M = {
    "blk.0.attn_v.weight": KIND.Q6_K,
    "blk.0.ffn_down.weight": KIND.Q6_K,
    "output.weight": KIND.Q6_K,
}
# All written by the gguf package's own quantizer.
OLD_KINDS = {
    "blk.0.attn_k.weight": KIND.Q8_0,
    "blk.0.attn_v.weight": KIND.Q4_1,
    "blk.1.ffn_up.weight": KIND.Q8_0,
    "output.weight": KIND.Q8_0,
}
MIXES = {
    "Q4_K_M": (KIND.Q4_K, Q4_K_M, {"layers.0.qkv": "q4_k+q6_k"}),
    "old": (KIND.Q4_0, OLD_KINDS, {"layers.0.qkv": "q4_0+q8_0+q4_1", "layers.1.gate_up": "q4_0+q8_0"}),
}
every_mix = pytest.mark.parametrize("mix", MIXES)
# Ranks of two have 8 rows of key and value each: no group of sixteen.
NARROW_HEADS = WIDE | {
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "num_attention_heads": 128,
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def folders(mix: str, source: Path, folder: Path, store: Store) -> tuple[Path, Path]:
    """Of a file of that mix: its own blocks, and its dequantized weights."""
    kind, kinds, _ = MIXES[mix]
    path = write_gguf(folder / "mix.gguf", source, kind=kind, kinds=kinds)
    kept = convert_gguf(path, store, dtype=torch.float32, kept_as="blocks")
    return kept, convert_gguf(path, store, dtype=torch.float32)


@every_mix
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}], ids=str)
def test_every_projection_stays_in_blocks_and_is_close_to_transformers_on_the_dequantized_weights(
    mix: str,
    changes: dict[str, Any],
    make_tiny_folder: Change,
    tmp_path: Path,
    store: Store,
    logits_of: Run,
) -> None:
    source = make_tiny_folder(**WIDE | {"num_hidden_layers": 2} | changes)
    kept, dense = folders(mix, source, tmp_path, store)
    config = read_model_config(kept)
    checkpoint = read_checkpoint(find_model(config.architecture), config, kept)
    names = {name: scheme.name for name, scheme in checkpoint.schemes.schemes.items()}
    assert names.keys() == {name for name, spec in checkpoint.specs.items() if spec.projection}
    assert {name: scheme for name, scheme in names.items() if "+" in str(scheme)} == MIXES[mix][2]
    found, wanted = restored(kept), restored(dense)
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name
    expected = oracle_logits(oracle(dense, "LlamaForCausalLM"), PROMPT)
    assert relative_error(logits_of(kept, PROMPT), expected) < 0.06  # two layers, x in eight bits


@every_mix
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_has_its_rows_of_each_kind_as_the_file_has_them(
    mix: str, ranks: int, make_tiny_folder: Change, tmp_path: Path, store: Store
) -> None:
    """Four ranks have each of two heads of keys and values twice."""
    source = make_tiny_folder(**NARROW_HEADS | {"hidden_size": 1024, "intermediate_size": 1024})
    kept, dense = folders(mix, source, tmp_path, store)
    config, wanted = read_model_config(kept), restored(dense)
    definition = find_model(config.architecture)
    checkpoint = read_checkpoint(definition, config, kept)
    sharding = sharding_of(definition, config, ranks)
    schemes = checkpoint.schemes.of_rank(sharding)
    for rank in range(ranks):
        weights = load_weights(checkpoint, dtype=torch.float32, device="cpu", schemes=schemes, rank=rank)
        for parameter in MIXES[mix][2]:
            stored: Any = schemes.join(weights.by_name)[parameter]
            rows = [
                wanted[source][run.start : run.start + run.num_rows]
                for source, share in sharding.shares(parameter, rank).items()
                for run in share.runs
            ]
            assert torch.equal(stored.restored(), torch.cat(rows))


def test_a_model_of_made_up_weights_has_the_parts_of_a_real_one(
    make_tiny_folder: Change, tmp_path: Path, store: Store
) -> None:
    kept, _ = folders("old", make_tiny_folder(**WIDE | {"num_hidden_layers": 2}), tmp_path, store)
    config = read_model_config(kept)
    definition = find_model(config.architecture)
    checkpoint = read_checkpoint(definition, config, kept)
    into: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "schemes": checkpoint.schemes}
    made_up = dummy_weights(definition, config, seed=0, **into)
    real = load_weights(checkpoint, **into)

    def shapes(weights: dict[str, Tensor]) -> dict[str, Any]:
        return {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}

    assert shapes(made_up.by_name) == shapes(real.by_name)
    assert 0 < made_up.errors()["layers.0.qkv"].relative_rms < 0.1


def test_gpus_keep_no_projection_of_several_kinds(
    make_tiny_folder: Change, tmp_path: Path, store: Store
) -> None:
    source = make_tiny_folder(**WIDE | {"num_hidden_layers": 2})
    path = write_gguf(tmp_path / "mix.gguf", source, kind=KIND.Q4_0, kinds=OLD_KINDS)
    for way in set(KEPT) - {"blocks"}:
        folder = convert_gguf(path, store, dtype=torch.float32, kept_as=way)
        modules = json.loads((folder / "config.json").read_text())["quantization_config"]["modules"]
        assert not [name for name in modules if "layers.0.self_attn" in name and "o_proj" not in name]
        assert "model.layers.1.self_attn.q_proj" in modules


def test_blocks_beside_a_dequantized_part_are_refused_by_name(
    make_tiny_folder: Change, tmp_path: Path, store: Store
) -> None:
    """No conversion writes that; a folder that somebody changed may have it."""
    kept, _ = folders("old", make_tiny_folder(**WIDE | {"num_hidden_layers": 2}), tmp_path, store)
    config = json.loads((kept / "config.json").read_text())
    del config["quantization_config"]["modules"]["model.layers.0.self_attn.k_proj"]
    (tmp_path / "changed").mkdir()
    (tmp_path / "changed" / "config.json").write_text(json.dumps(config))
    (tmp_path / "changed" / "model.safetensors").symlink_to(kept / "model.safetensors")
    read = read_model_config(tmp_path / "changed")
    message = r"layers.0.qkv is one projection of .*q_proj.* keeps differently: .*k_proj as it is"
    with pytest.raises(UnsupportedError, match=message):
        read_checkpoint(find_model(read.architecture), read, tmp_path / "changed")
