"""Checkpoints that are written, read back: what the loader keeps, and what each family computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lamina.common.progress import say_nothing
from lamina.models.checkpoints.weights import load_weights, read_checkpoint
from lamina.models.config import read_model_config
from lamina.models.quantizing.recipe import Recipe
from lamina.models.quantizing.source import read_source
from lamina.models.quantizing.write import write_checkpoint
from lamina.models.registry import find_model

from ...families import FAMILIES, oracle, oracle_logits
from .literal_reader import dequantized
from .test_written_checkpoints import RECIPES, in_dtype

PROMPT = [(37 * i) % 317 + 3 for i in range(24)]
Logits = Callable[..., Tensor]


def write(folder: Path, to: Path, recipe: Recipe) -> Path:
    to.mkdir()
    write_checkpoint(read_source(folder, recipe), to, progress=say_nothing)
    return to


def dense(folder: Path, quantized: Path, to: Path) -> Path:
    """The original with the weights that the quantized one stands for."""
    to.mkdir()
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(dequantized(quantized), to / "model.safetensors", {"format": "pt"})
    return to


def kept(folder: Path) -> tuple[dict[str, Tensor], set[str | None]]:
    """Each tensor of a dense checkpoint as Lamina keeps it, and the schemes it keeps projections by."""
    config = read_model_config(folder)
    checkpoint = read_checkpoint(find_model(config.architecture), config, folder)
    weights = load_weights(checkpoint, dtype=torch.float32, device="cpu")
    joined, out = weights.schemes.join(weights.by_name), dict[str, Tensor]()
    for name, spec in weights.specs.items():
        one: Any = joined[name]
        rows = one if isinstance(one, Tensor) else one.scheme.restore(one.parts)
        sizes = [shape[0] for shape in spec.source_shapes.values()]
        out |= dict(zip(spec.sources, rows.split(sizes), strict=True))
    return out, {scheme.name for scheme in weights.schemes.schemes.values()}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_loader_keeps_what_was_written(
    tiny_folder: Path, tmp_path: Path, recipe: Recipe, dtype: torch.dtype
) -> None:
    original = in_dtype(tiny_folder, tmp_path / "original", dtype)
    found, schemes = kept(write(original, tmp_path / "new", recipe))
    assert schemes == {recipe.scheme}
    wanted = dequantized(tmp_path / "new")
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        # A zero point is kept as what it adds, rounded once: q * scale + zero for (q - z) * scale.
        tolerance = 0.0 if recipe.symmetric else 1e-6 * float(weight.abs().max())
        assert float((found[name] - weight.float()).abs().max()) <= tolerance, name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_with_what_was_written(tmp_path: Path, family: str, logits_of: Logits) -> None:
    original = FAMILIES[family].save(tmp_path / "original")
    quantized = write(original, tmp_path / "new", Recipe(scheme="w4a16", group_size=32))
    model = oracle(dense(original, quantized, tmp_path / "dense"), FAMILIES[family].architecture)
    ours, expected = logits_of(quantized, PROMPT), oracle_logits(model, PROMPT)
    assert float((ours - expected).norm()) < 1e-4 * float(expected.norm())


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_with_activations_quantized_too_logits_stay_near(
    tiny_folder: Path, tmp_path: Path, scheme: str, logits_of: Logits
) -> None:
    quantized = write(tiny_folder, tmp_path / "new", Recipe(scheme=scheme))
    model = oracle(dense(tiny_folder, quantized, tmp_path / "dense"), "LlamaForCausalLM")
    ours, expected = logits_of(quantized, PROMPT), oracle_logits(model, PROMPT)
    assert float((ours - expected).norm()) < 0.2 * float(expected.norm())
