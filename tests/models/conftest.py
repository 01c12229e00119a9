"""A model run on plain dense attention, and checkpoints with one thing changed."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lamina.custom_ops.paged_attention.reference import dense_attention
from lamina.models.checkpoints.weights import load_weights, read_checkpoint
from lamina.models.config import read_model_config
from lamina.models.layers import FAST_OPS, Ops
from lamina.models.quantization.model_schemes import uniform, with_stored_weights
from lamina.models.quantization.scheme import find_scheme
from lamina.models.registry import find_model
from lamina.models.rope import rotation_tables


@pytest.fixture(scope="module", autouse=True)
def _build_once(build_once: None) -> None:
    """For all of these tests."""


def _logits(
    folder: Path,
    token_ids: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    ops: Ops = FAST_OPS,
    max_model_len: int | None = None,
    quantized: bool = False,
    config_changes: Mapping[str, Any] | None = None,
    weight_changes: Callable[[dict[str, Tensor]], None] = lambda weights: None,
) -> Tensor:
    config = read_model_config(folder)
    model = find_model(config.architecture)
    checkpoint = read_checkpoint(model, config, folder)
    schemes = uniform(find_scheme("int8"), checkpoint.specs) if quantized else checkpoint.schemes
    weights = load_weights(checkpoint, dtype=dtype, device="cpu", schemes=schemes).by_name
    config = dataclasses.replace(config, **config_changes or {})
    length = max_model_len or len(token_ids)
    weights |= rotation_tables(config, max_model_len=length, dtype=dtype, device="cpu")
    weight_changes(weights)
    specs = model.attention(config)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        spec = specs[layer]
        mask: dict[str, Any] = {"window": spec.window or -1, "chunk": spec.chunk or -1}
        mask["soft_cap"] = spec.soft_cap or 0.0
        out.copy_(dense_attention(query, key, value, spec.scale, **mask))

    ids, positions = (
        torch.tensor(token_ids, dtype=torch.int32),
        torch.arange(len(token_ids), dtype=torch.int32),
    )
    joined, ops = schemes.join(weights), with_stored_weights(ops)
    with torch.inference_mode():
        return model.logits(config, joined, model.forward(config, joined, ids, positions, attend, ops), ops)


@pytest.fixture(scope="session")
def logits_of() -> Callable[..., Tensor]:
    """logits_of(folder, token_ids, dtype=, ops=, quantized=, …) -> our logits [T, vocab], attention dense."""
    return _logits


@pytest.fixture(scope="session")
def reference_logits(tiny_reference: Callable[[Path], Any]) -> Callable[[Path, Sequence[int]], Tensor]:
    """reference_logits(folder, token_ids) -> transformers' logits [T, vocab] in fp32."""

    def run(folder: Path, token_ids: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = tiny_reference(folder)(torch.tensor([token_ids])).logits[0]
            return logits

    return run


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """changed(folder, config={…}, tensors={name: tensor, or None to drop it}) -> changed copy."""

    def change(
        folder: Path, *, config: dict[str, Any] | None = None, tensors: dict[str, Tensor | None] | None = None
    ) -> Path:
        copy = tmp_path / "changed"
        shutil.copytree(folder, copy)
        if config is not None:
            path = copy / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | config))
        if tensors is not None:
            held = load_file(copy / "model.safetensors") | tensors
            save_file({name: t for name, t in held.items() if t is not None}, copy / "model.safetensors")
        return copy

    return change
