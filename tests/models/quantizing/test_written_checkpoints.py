"""Checkpoints that are written: their values against the originals, and what transformers makes of them."""

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from lamina.common.progress import say_nothing
from lamina.models.quantizing.grids import Grid, grid_of
from lamina.models.quantizing.recipe import Recipe
from lamina.models.quantizing.source import read_source
from lamina.models.quantizing.write import Written, write_checkpoint

from ...families import FAMILIES
from .literal_reader import dequantized, read_tensors

RECIPES = {
    "fp8": Recipe(scheme="fp8"),
    "int8": Recipe(scheme="int8"),
    "w4a16, groups of 32": Recipe(scheme="w4a16", group_size=32),
    "w4a16, groups of 64 with zero points": Recipe(scheme="w4a16", group_size=64, symmetric=False),
    "w4a16, rows": Recipe(scheme="w4a16", group_size=-1),
    "w4a16, rows with zero points": Recipe(scheme="w4a16", group_size=-1, symmetric=False),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PROMPT = torch.tensor([[(37 * i) % 317 + 3 for i in range(24)]])


def write(folder: Path, to: Path, recipe: Recipe, **more: Any) -> Written:
    to.mkdir()
    return write_checkpoint(read_source(folder, recipe), to, progress=say_nothing, **more)


def in_dtype(folder: Path, to: Path, dtype: torch.dtype) -> Path:
    """The same model with its tensors in another dtype."""
    to.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}))
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def all_codes(grid: Grid) -> Tensor:
    """Every code that a grid has."""
    if grid.is_whole:
        return torch.arange(grid.smallest, grid.largest + 1)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return every[every.isfinite()]


@given(
    recipe=st.sampled_from([*RECIPES.values()]),
    num_rows=st.integers(1, 9),
    exponent=st.integers(-12, 6),
    shift=st.sampled_from([-3.0, 0.0, 0.0, 3.0]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_every_weight_gets_the_code_that_stands_for_the_value_nearest_to_it(
    recipe: Recipe, num_rows: int, exponent: int, shift: float, dtype: torch.dtype, seed: int
) -> None:
    rows = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(seed)) + shift
    rows = (rows * 2.0**exponent).to(dtype).float()
    rows[0, :32] = 0.0
    grid = grid_of(recipe)
    fit = grid.fit(rows, dtype)
    assert torch.equal(fit.scale, fit.scale.to(dtype).float())
    assert bool((fit.scale > 0).all())
    restored = grid.restore_rows(grid.codes_of_rows(rows, fit), fit)
    group = recipe.columns or 64
    scale = fit.scale.repeat_interleave(group, dim=1)
    zero = torch.zeros_like(scale) if fit.zero is None else fit.zero.repeat_interleave(group, dim=1)
    nearest = ((all_codes(grid) - zero[..., None]) * scale[..., None] - rows[..., None]).abs().amin(dim=2)
    tolerance = 1e-6 * rows.abs() + 1e-5 * scale  # of ties, and of a division beside a multiplication
    assert bool(((restored - rows).abs() <= nearest + tolerance).all())
    if grid.is_whole:  # the largest positive weight of a symmetric group of four bits is cut by half a step
        largest = scale * (0.51 if grid.divisor != 7.5 else 0.55)
        groups = rows.unflatten(1, (-1, group))
        high, low = groups.amax(dim=2).clamp_min(0), groups.amin(dim=2).clamp_max(0)
        span = torch.maximum(high, -low) if fit.zero is None else high - low
        lost = span - grid.divisor * fit.scale  # where the scale was rounded down, to a subnormal by much
        largest += lost.clamp_min(0).repeat_interleave(group, dim=1)
        assert bool(((restored - rows).abs() <= largest).all())
    assert bool((restored[0, :32] == 0).all())


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_projections_are_quantized_by_the_error_told_and_all_else_is_as_it_was(
    tiny_folder: Path, tmp_path: Path, recipe: Recipe, dtype: torch.dtype
) -> None:
    folder = in_dtype(tiny_folder, tmp_path / "original", dtype)
    written = write(folder, tmp_path / "new", recipe)
    before, after = load_file(folder / "model.safetensors"), dequantized(tmp_path / "new")
    assert before.keys() == after.keys()
    quantized = {f"{name}.weight" for name in written.errors}
    assert quantized == {name for name in before if "_proj" in name}
    for name, tensor in before.items():
        if name not in quantized:
            assert after[name].dtype == tensor.dtype
            assert torch.equal(after[name], tensor)
            continue
        off = float((after[name] - tensor.float()).norm() / tensor.float().norm())
        assert written.errors[name.removesuffix(".weight")].relative_rms == pytest.approx(off, rel=1e-4)
        bits = {"fp8": 0.03, "int8": 0.008, "w4a16": 0.12}
        assert 0 < off < bits[recipe.scheme]
    assert written.bytes_after == sum(t.nbytes for t in read_tensors(tmp_path / "new").values())
    assert written.bytes_before == sum(t.nbytes for t in before.values())


def plain_model(folder: Path, quantized: Path, dtype: torch.dtype) -> Any:
    """The original in transformers, its weights those that the quantized checkpoint stands for."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    weights = {name: tensor.to(dtype) for name, tensor in dequantized(quantized).items()}
    model.load_state_dict(weights, strict=False)
    return model.eval()


def by_compressed_tensors(folder: Path, **arguments: Any) -> Any:
    pytest.importorskip("compressed_tensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        if arguments:
            arguments = {"quantization_config": transformers.CompressedTensorsConfig(**arguments)}
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, **arguments
        )
        assert not any(told.values())
        return model.eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    out: Tensor = model(PROMPT).logits
    return out


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_transformers_dequantizes_to_the_same_weights_and_logits(
    tiny_folder: Path, tmp_path: Path, recipe: Recipe, dtype: torch.dtype
) -> None:
    folder = in_dtype(tiny_folder, tmp_path / "original", dtype)
    write(folder, tmp_path / "new", recipe)
    theirs = by_compressed_tensors(tmp_path / "new", dequantize=True)
    ours = plain_model(folder, tmp_path / "new", dtype)
    for name, weight in ours.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], weight), name
    assert torch.equal(logits(theirs), logits(ours))


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.symmetric])
def test_transformers_serves_it_as_it_lies(tiny_folder: Path, tmp_path: Path, name: str) -> None:
    """Without zero points: transformers 5 takes those for unpacked ones where it does not dequantize."""
    write(tiny_folder, tmp_path / "new", RECIPES[name])
    theirs = by_compressed_tensors(tmp_path / "new")
    ours = plain_model(tiny_folder, tmp_path / "new", torch.float32)
    got, exact = logits(theirs), logits(ours)
    quantized = [each for each in theirs.modules() if hasattr(each, "quantization_scheme")]
    assert len(quantized) == 14
    inputs = [each.quantization_scheme.input_activations for each in quantized]
    if RECIPES[name].scheme == "w4a16":
        assert inputs == [None] * 14
        assert torch.equal(got, exact)
        return
    assert all(each.dynamic and each.strategy == "token" for each in inputs)
    for each in quantized:
        each.quantization_enabled = False  # of activations, which weights alone do not tell
    assert not torch.equal(got, exact)
    assert torch.equal(logits(theirs), exact)


@pytest.mark.parametrize("name", RECIPES)
def test_compressed_tensors_compresses_to_the_same_tensors(
    tiny_folder: Path, tmp_path: Path, name: str
) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    scheme_of = pytest.importorskip("compressed_tensors.quantization").QuantizationScheme
    recipe = RECIPES[name]
    write(tiny_folder, tmp_path / "new", recipe)
    config = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    scheme = scheme_of(**config["config_groups"]["group_0"])
    compressor = compressors.BaseCompressor.get_value_from_registry(config["format"])
    tensors, module = read_tensors(tmp_path / "new"), "model.layers.1.mlp.up_proj"
    ours = {
        name.removeprefix(module + "."): one for name, one in tensors.items() if name.startswith(module + ".")
    }
    weight = load_file(tiny_folder / "model.safetensors")[f"{module}.weight"]
    grid = grid_of(recipe)
    fit = grid.fit(weight, weight.dtype)
    zero = torch.zeros_like(fit.scale) if fit.zero is None else fit.zero
    state = {"weight": weight, "weight_scale": fit.scale, "weight_zero_point": zero.to(torch.int8)}
    theirs = compressor.compress(state, scheme)
    assert theirs.keys() == ours.keys()
    for part, tensor in theirs.items():
        assert ours[part].dtype == tensor.dtype
        assert ours[part].tolist() == tensor.tolist(), part


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_of_a_family_is_quantized_but_the_head(tmp_path: Path, family: str) -> None:
    folder = FAMILIES[family].save(tmp_path / "original")
    written = write(folder, tmp_path / "new", Recipe(scheme="w4a16", group_size=32))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    linear = {name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    assert written.errors.keys() == linear - {"lm_head"}
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config.pop("quantization_config")["ignore"] == ["lm_head"]
    assert config == json.loads((folder / "config.json").read_text())
    before = load_file(folder / "model.safetensors")
    assert dequantized(tmp_path / "new").keys() == before.keys()


def test_files_of_limited_size_hold_the_same_tensors(tiny_folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(scheme="w4a16", group_size=32, symmetric=False)
    write(tiny_folder, tmp_path / "one", recipe)
    written = write(tiny_folder, tmp_path / "many", recipe, max_shard_bytes=40_000)
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 3
    one, many = read_tensors(tmp_path / "one"), read_tensors(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == written.bytes_after
    theirs = by_compressed_tensors(tmp_path / "many", dequantize=True)
    assert torch.equal(logits(theirs), logits(plain_model(tiny_folder, tmp_path / "one", torch.float32)))


def test_a_tensor_of_odd_size_leaves_the_next_ones_where_they_can_be_read(
    tmp_path: Path, make_tiny_folder: Callable[..., Path]
) -> None:
    """An odd number of bytes before scales of two bytes each, and words of zero points that are not full."""
    odd = {"intermediate_size": 33, "hidden_size": 33, "head_dim": 6, "num_attention_heads": 3}
    folder = in_dtype(make_tiny_folder(**odd, num_key_value_heads=1), tmp_path / "bf16", torch.bfloat16)
    for name in ("fp8", "int8", "w4a16, rows with zero points"):
        write(folder, tmp_path / name, RECIPES[name])
        after = dequantized(tmp_path / name)
        for module, before in load_file(folder / "model.safetensors").items():
            assert (after[module].float() - before.float()).norm() <= 0.2 * before.float().norm()


def test_the_files_beside_the_weights_come_along(tiny_text_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "original"
    folder.mkdir()
    for path in tiny_text_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    others: Mapping[str, str] = {"LICENSE.txt": "free", "README.md": "of the original", "notes.bin": "no"}
    for name, text in others.items():
        (folder / name).write_text(text)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    write(folder, tmp_path / "new", RECIPES["int8"])
    new = {path.relative_to(tmp_path / "new").as_posix() for path in (tmp_path / "new").rglob("*")}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE.txt"} <= new
    assert "additional_chat_templates/tools.jinja" in new
    assert not {"README.md", "notes.bin"} & new
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert (
        theirs("a text")["input_ids"]
        == transformers.AutoTokenizer.from_pretrained(folder)("a text")["input_ids"]
    )
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
