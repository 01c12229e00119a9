"""Blocks of GGUF files that are kept as they lie, as groups of w4a16 and w8a16 or as they are, and logits."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import LoadError
from lamina.common.progress import say_nothing
from lamina.common.store import Store
from lamina.custom_ops.linear_blocks.layout import KINDS
from lamina.models.checkpoints.gguf import config_of_gguf, convert_gguf
from lamina.models.checkpoints.quantized.gguf_blocks import HEADS, KEPT, checked, kept_as, unpack_blocks
from lamina.models.checkpoints.weights import load_weights, read_checkpoint
from lamina.models.config import read_model_config
from lamina.models.quantization.w4a16 import w4a16, w8a16
from lamina.models.registry import find_model
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.startup.folder import find_folder

from ...families import oracle, oracle_logits
from .test_gguf import KIND, PROMPT, Run, write_gguf

every_kind = pytest.mark.parametrize("kind", [KIND.Q4_0, KIND.Q4_1, KIND.Q8_0])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def restored(folder: Path) -> Mapping[str, Any]:
    """What each weight stands for, in float32, by its name in a checkpoint."""
    config = read_model_config(folder)
    checkpoint = read_checkpoint(find_model(config.architecture), config, folder)
    weights = load_weights(checkpoint, dtype=torch.float32, device="cpu")
    return checkpoint.schemes.restored(weights.by_name)


@every_kind
@given(rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 999))
def test_a_block_stands_for_what_the_gguf_package_makes_of_it(
    kind: KIND, rows: int, blocks: int, seed: int
) -> None:
    """Of bits that no quantization would write, too: any scale, any minimum."""
    generator = np.random.default_rng(seed)
    heads = HEADS[kind.name]
    whole = generator.integers(0, 256, (rows, blocks, KINDS[kind.name].num_bytes), dtype=np.uint8)
    whole[:, :, : 2 * heads] = generator.normal(size=(rows, blocks, heads)).astype(np.float16).view(np.uint8)
    lying = whole.reshape(rows, -1)
    exact = torch.from_numpy(gguf.dequantize(lying, kind))
    parts = unpack_blocks(torch.from_numpy(lying.copy()), (rows, 32 * blocks), kind.name)
    scheme = w8a16(32) if kind == KIND.Q8_0 else w4a16(32, zero=heads > 1)
    found = scheme.restore(parts)
    if heads == 1:
        assert torch.equal(found, exact)
    torch.testing.assert_close(found, exact, rtol=0, atol=16 * 4 * 2.0**-22)


@every_kind
def test_a_scale_that_is_none_is_refused(kind: KIND) -> None:
    rows = torch.zeros(1, KINDS[kind.name].num_bytes, dtype=torch.uint8)
    rows[0, 1] = 0x7C  # infinity
    with pytest.raises(LoadError, match="scales that are not finite"):
        unpack_blocks(rows, (1, 32), kind.name)


@every_kind
def test_weights_and_logits_are_those_of_the_file_dequantized(
    kind: KIND, tiny_folder: Path, tmp_path: Path, store: Store, logits_of: Run
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder, kind=kind)
    dense = convert_gguf(path, store, dtype=torch.float32)
    kept = convert_gguf(path, store, dtype=torch.float32, kept_as="groups")
    assert kept != dense
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (kept, dense)]
    assert sizes[0] < sizes[1] / 2
    wanted, found = restored(dense), restored(kept)
    for name, weight in found.items():
        torch.testing.assert_close(weight, wanted[name], rtol=0, atol=1e-6)
    torch.testing.assert_close(logits_of(kept, PROMPT), logits_of(dense, PROMPT), rtol=1e-3, atol=1e-4)
    assert convert_gguf(path, store, dtype=torch.float32, kept_as="groups") == kept


def test_a_projection_of_several_kinds_is_dequantized_whole(
    tiny_folder: Path, tmp_path: Path, store: Store
) -> None:
    kinds = {"blk.0.attn_v.weight": KIND.Q8_0, "blk.1.ffn_up.weight": KIND.Q4_1}
    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder, kind=KIND.Q4_0, kinds=kinds)
    folder = convert_gguf(path, store, dtype=torch.float32, kept_as="groups")
    modules = json.loads((folder / "config.json").read_text())["quantization_config"]["modules"]
    layers = "model.layers"
    for name in (f"{layers}.0.self_attn.q_proj", f"{layers}.1.mlp.gate_proj", f"{layers}.1.mlp.up_proj"):
        assert name not in modules
    assert modules[f"{layers}.1.self_attn.q_proj"] == modules[f"{layers}.1.mlp.down_proj"] == "Q4_0"
    wanted = restored(convert_gguf(path, store, dtype=torch.float32))
    for name, weight in restored(folder).items():
        torch.testing.assert_close(weight, wanted[name], rtol=0, atol=1e-6)


def test_a_file_of_other_kinds_says_nothing_of_quantization(
    tiny_folder: Path, tmp_path: Path, store: Store
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder, kind=KIND.Q5_0)
    folder = config_of_gguf(path, store, dtype=torch.float32, kept_as="groups")
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_the_config_alone_says_what_is_kept(tiny_folder: Path, tmp_path: Path, store: Store) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder, kind=KIND.Q4_0)
    folder = config_of_gguf(path, store, dtype=torch.float32, kept_as="groups")
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "gguf"


@pytest.mark.parametrize(
    "device, quantization, way",
    [
        ("cpu", None, "blocks"),
        ("cpu", "dense", None),
        ("cpu", "q8", None),
        ("cuda", None, "groups"),
        ("cuda", "int8", None),
    ],
)
def test_blocks_are_kept_where_nothing_else_is_asked_for(
    device: str,
    quantization: str | None,
    way: str | None,
    tiny_folder: Path,
    tmp_path: Path,
    store: Store,
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder, kind=KIND.Q4_0)
    config = RuntimeConfig(model=str(path), dtype="bfloat16", quantization=quantization, tokenizer="none")
    folder = find_folder(config, store, torch.device(device), say_nothing)
    said = json.loads((folder / "config.json").read_text()).get("quantization_config")
    assert (said and said["kept_as"]) == way


@pytest.mark.parametrize("capability, has_kernel", [((9, 0), True), ((8, 0), False), ((10, 0), False)])
def test_eight_bits_are_kept_on_gpus_that_have_a_kernel_for_them(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has_kernel: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    kept = KEPT[kept_as(torch.device("cuda", 0))]
    assert {*kept} == {"Q4_0", "Q4_1", *(["Q8_0"] if has_kernel else [])}


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64}


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", [KIND[name] for name in KEPT["blocks"]])
@pytest.mark.parametrize("tied", [False, True])
def test_every_kind_is_multiplied_as_it_lies_and_close_to_transformers_on_the_dequantized_weights(
    kind: KIND,
    tied: bool,
    make_tiny_folder: Callable[..., Path],
    tmp_path: Path,
    store: Store,
    logits_of: Run,
) -> None:
    """What differs: x has eight bits at each product. A tied head is kept in the embedding's blocks."""
    source = make_tiny_folder(**WIDE, tie_word_embeddings=tied)
    path = write_gguf(tmp_path / "wide.gguf", source, kind=kind)
    dense = convert_gguf(path, store, dtype=torch.float32)
    kept = convert_gguf(path, store, dtype=torch.float32, kept_as="blocks")
    config = read_model_config(kept)
    checkpoint = read_checkpoint(find_model(config.architecture), config, kept)
    assert {scheme.name for scheme in checkpoint.schemes.schemes.values()} == {kind.name.lower()}
    assert "lm_head" in checkpoint.schemes.schemes
    wanted, found = restored(dense), restored(kept)
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight)
    assert (
        relative_error(logits_of(kept, PROMPT), oracle_logits(oracle(dense, "LlamaForCausalLM"), PROMPT))
        < 0.03
    )


@pytest.mark.parametrize("kind", KEPT["blocks"])
def test_rows_whose_scales_are_none_are_refused(kind: str) -> None:
    rows = torch.zeros(3, KINDS[kind].num_bytes, dtype=torch.uint8)
    assert checked(rows, kind) is rows
    at = 0
    for size, unit in KINDS[kind].regions:
        if unit == 2:
            spoiled = rows.clone()
            spoiled[2, at + size - 1] = 0x7C  # infinity
            with pytest.raises(LoadError, match="scales that are not finite"):
                checked(spoiled, kind)
        at += size
