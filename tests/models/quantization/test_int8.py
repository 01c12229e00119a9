"""Projections in one byte a weight: their values, their error, and what a model computes with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from lamina.common.errors import LoadError, UnsupportedError
from lamina.common.store import Store
from lamina.models.checkpoints import loaded_weights
from lamina.models.checkpoints.gguf import convert_gguf
from lamina.models.checkpoints.loaded_weights import LoadedWeights
from lamina.models.checkpoints.weights import dummy_weights, load_weights, read_checkpoint
from lamina.models.config import read_model_config
from lamina.models.quantization.int8 import INT8
from lamina.models.quantization.model_schemes import uniform
from lamina.models.quantization.unquantized import UNQUANTIZED
from lamina.models.registry import ParameterSpec, find_model

from ...families import FAMILIES, oracle, oracle_logits
from ..checkpoints.test_gguf import write_gguf

Change = Callable[..., Path]
CPU = torch.device("cpu")
PROMPT = [(37 * i) % 317 + 3 for i in range(24)]


SCALE = "%scale"  # behind a projection's name


def load(folder: Path) -> tuple[dict[str, Tensor], LoadedWeights]:
    config = read_model_config(folder)
    checkpoint = read_checkpoint(find_model(config.architecture), config, folder)
    schemes = uniform(INT8, checkpoint.specs)
    loaded = load_weights(checkpoint, dtype=torch.float32, device=CPU, schemes=schemes)
    return loaded.by_name, loaded


def quantize(rows: Tensor) -> tuple[Tensor, Tensor, LoadedWeights]:
    specs = {"w": ParameterSpec(shape=tuple(rows.shape), sources=("w",), projection=True)}
    loaded = LoadedWeights(uniform(INT8, specs), dtype=rows.dtype, device=CPU)
    loaded.take("w", 0, rows)
    return loaded.by_name["w"], loaded.by_name["w" + SCALE], loaded


@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 40)),
    exponent=st.integers(-30, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    chunk=st.integers(1, 100),
    seed=st.integers(0, 99),
)
def test_no_weight_is_off_by_more_than_half_a_step_and_the_error_told_is_the_error_made(
    shape: tuple[int, int], exponent: int, dtype: torch.dtype, chunk: int, seed: int
) -> None:
    rows = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent).to(dtype)
    rows[0] = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded_weights, "CHUNK_ELEMENTS", chunk)
        values, scale, quantizer = quantize(rows)
    assert torch.equal(values.abs().amax(dim=1), torch.where(rows.abs().amax(dim=1) > 0, 127, 0))
    error = values.double() * scale.double()[:, None] - rows.double()
    assert (error.abs() <= scale.double()[:, None] * 0.50001).all()
    told = quantizer.errors()["w"]
    unit = float(rows.double().abs().max()) * 1e-6  # float32 rounds the product of a byte and its scale too
    assert told.max_error == pytest.approx(float(error.abs().max()), abs=unit)
    size = rows.double().square().mean().sqrt().clamp(min=1e-300)
    assert told.relative_rms == pytest.approx(float(error.square().mean().sqrt() / size), abs=1e-5)
    assert quantizer.total_error() == told


def test_a_fused_projection_has_the_bytes_of_its_parts(tiny_folder: Path) -> None:
    held, (loaded, _) = load_file(tiny_folder / "model.safetensors"), load(tiny_folder)
    parts = [quantize(held[f"model.layers.1.self_attn.{name}_proj.weight"]) for name in "qkv"]
    assert torch.equal(loaded["layers.1.qkv"], torch.cat([values for values, _, _ in parts]))
    assert torch.equal(loaded["layers.1.qkv" + SCALE], torch.cat([scale for _, scale, _ in parts]))


def test_projections_and_the_head_are_bytes_and_all_else_stays(tiny_folder: Path) -> None:
    loaded, quantizer = load(tiny_folder)
    assert {name.rpartition(".")[2] for name in quantizer.errors()} == {
        "qkv",
        "o",
        "gate_up",
        "down",
        "lm_head",
    }
    assert all(0 < error.relative_rms < 0.01 for error in quantizer.errors().values())
    for name, weight in loaded.items():
        expected = torch.int8 if name in quantizer.errors() else torch.float32
        assert weight.dtype == expected, name


def test_a_gguf_file_gives_the_bytes_of_its_source(tiny_folder: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder)
    (ours, _), (expected, _) = (
        load(convert_gguf(path, Store(tmp_path), dtype=torch.float32)),
        load(tiny_folder),
    )
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_a_tied_head_is_quantized_beside_the_embedding(make_tiny_folder: Callable[..., Path]) -> None:
    folder = make_tiny_folder(tie_word_embeddings=True)
    loaded, _ = load(folder)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(loaded["embedding"], embedding)
    assert torch.equal(loaded["lm_head"], quantize(embedding)[0])


def test_invented_weights_are_quantized_like_a_checkpoints(tiny_folder: Path) -> None:
    config = read_model_config(tiny_folder)
    model = find_model(config.architecture)
    into: dict[str, Any] = {"dtype": torch.bfloat16, "device": CPU, "seed": 3}
    dense, bytes_ = (
        dummy_weights(model, config, schemes=uniform(scheme, model.parameters(config)), **into).by_name
        for scheme in (UNQUANTIZED, INT8)
    )
    assert torch.equal(bytes_["layers.1.down"], quantize(dense["layers.1.down"])[0])
    assert torch.equal(bytes_["embedding"], dense["embedding"])


def test_weights_that_are_not_finite_are_refused_by_name(tiny_folder: Path, changed: Change) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = load_file(tiny_folder / "model.safetensors")[name]
    tensor[5, 7] = torch.inf
    with pytest.raises(LoadError, match=r"layers\.1\.gate_up holds weights that are not finite"):
        load(changed(tiny_folder, tensors={name: tensor}))


def test_a_device_that_multiplies_no_bytes_is_refused_by_name(tiny_folder: Path) -> None:
    config = read_model_config(tiny_folder)
    specs = find_model(config.architecture).parameters(config)
    for device in (CPU, torch.device("cuda")):
        uniform(INT8, specs).check(device)
    with pytest.raises(
        UnsupportedError, match=r"quantization of .* is 'int8'.*device is 'mps'.*quantization=None"
    ):
        uniform(INT8, specs).check(torch.device("mps"))


def test_a_model_that_declares_no_projection_is_refused() -> None:
    specs = {"script": ParameterSpec(shape=(4, 4), sources=("script",))}
    with pytest.raises(UnsupportedError, match="declares no projection"):
        uniform(INT8, specs)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_declares_its_projections_and_computes_with_their_bytes(
    name: str, tmp_path: Path, logits_of: Callable[..., Tensor]
) -> None:
    """All matrices but the embedding, whose rows are looked up; beside transformers on the same values."""
    folder, family = FAMILIES[name].save(tmp_path), FAMILIES[name]
    model = oracle(folder, family.architecture)
    config = read_model_config(folder)
    specs = find_model(family.architecture).parameters(config)
    assert set(uniform(INT8, specs).schemes) == {n for n, s in specs.items() if len(s.shape) == 2} - {
        "embedding"
    }
    dequantize(model)
    torch.testing.assert_close(
        logits_of(folder, PROMPT, quantized=True), oracle_logits(model, PROMPT), rtol=1e-4, atol=1e-4
    )


def dequantize(model: Any) -> None:
    """Let transformers' model compute with what the bytes stand for; a tied head becomes one of its own."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            values, scale, _ = quantize(module.weight.data)
            module.weight = torch.nn.Parameter(values * scale[:, None])
