"""Checkpoints that are written, held to what vLLM's loader asks of the format.

Its rules are written out here after vLLM's compressed_tensors.py and its schemes WNA16, W8A8Fp8 and W8A8Int8:
which scheme a config means, and the shape and dtype of each parameter that a module then has. A tensor of a
checkpoint is copied into the parameter of its name, which must have its shape; floats are converted.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lamina.common.errors import LaminaError
from lamina.models.quantizing.recipe import Recipe

from .literal_reader import read_tensors
from .test_written_checkpoints import DTYPES, RECIPES, in_dtype, write

Parameters = dict[str, tuple[tuple[int, ...], torch.dtype | None]]  # None: any float
ACTIVATIONS = ("float-quantized", "int-quantized", "naive-quantized")  # formats that may quantize them
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
SCHEMES = {"fp8": "W8A8Fp8", "int8": "W8A8Int8", "w4a16": "WNA16"}
PER_WORD = 8  # numbers of four bits


def group_of(config: dict[str, Any]) -> dict[str, Any]:
    """The one group of a config, which vLLM's classes of layers match: their names contain its target."""
    (group,) = config["config_groups"].values()
    assert all("Linear" in name for name in ("QKVParallelLinear", "RowParallelLinear"))
    assert group["targets"] == ["Linear"]
    return dict(group)


def scheme_of(config: dict[str, Any]) -> str:
    """The scheme that vLLM chooses. LookupError where it finds none."""
    group = group_of(config)
    weights, inputs, kind = group["weights"], group["input_activations"], group["format"] or config["format"]
    by_channel, is_static = weights["strategy"] == "channel", not weights["dynamic"]
    is_alone = inputs is None and is_static and (by_channel or weights["strategy"] == "group")
    if is_alone and kind == "pack-quantized" and weights["num_bits"] in (4, 8):
        return "WNA16"
    if kind in ACTIVATIONS and inputs is not None and is_static and weights["symmetric"]:
        is_float = weights["type"] == inputs["type"] == "float"
        if is_float and weights["strategy"] in ("tensor", "channel", "block") and inputs["dynamic"]:
            return "W8A8Fp8"
        is_token = inputs["strategy"] == "token" and inputs["dynamic"]
        if by_channel and is_token and weights["num_bits"] == inputs["num_bits"] == 8:
            return "W8A8Int8"
    raise LookupError(f"no scheme for {group}")


def parameters_of(config: dict[str, Any], rows: int, columns: int) -> Parameters:
    """The parameters of a module [rows, columns], fused ones too: of all rows together."""
    weights, scheme = group_of(config)["weights"], scheme_of(config)
    if scheme != "WNA16":
        dtype = torch.float8_e4m3fn if scheme == "W8A8Fp8" else torch.int8
        return {"weight": ((rows, columns), dtype), "weight_scale": ((rows, 1), None)}
    assert weights["group_size"] is not None or weights["strategy"] == "channel"
    groups = columns // (columns if weights["group_size"] in (None, -1) else weights["group_size"])
    found: Parameters = {
        "weight_packed": ((rows, columns // PER_WORD), torch.int32),
        "weight_scale": ((rows, groups), None),
        "weight_shape": ((2,), torch.int64),
    }
    if not weights["symmetric"]:
        found["weight_zero_point"] = ((rows // PER_WORD, groups), torch.int32)
    if weights["actorder"] == "group":
        found["weight_g_idx"] = ((columns,), torch.int32)
    return found


def fits(tensors: dict[str, Tensor], wanted: Parameters) -> bool:
    """Whether the tensors of a module are its parameters, all and no others."""
    return tensors.keys() == wanted.keys() and all(
        tensors[name].shape == shape
        and (tensors[name].is_floating_point() if dtype is None else tensors[name].dtype == dtype)
        for name, (shape, dtype) in wanted.items()
    )


def modules_of(folder: Path) -> dict[str, dict[str, Tensor]]:
    """The tensors of each quantized module by what follows its name."""
    found: dict[str, dict[str, Tensor]] = {}
    tensors = read_tensors(folder)
    modules = [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]
    for module in modules:
        own = {name for name in tensors if name.rpartition(".")[0] == module}
        found[module] = {name.rpartition(".")[2]: tensors[name] for name in own}
    return found


def stacked(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of a fused module: rows one below the other; the shape is whichever comes last."""
    return {
        name: parts[-1][name] if name == "weight_shape" else torch.cat([part[name] for part in parts])
        for name in parts[0]
    }


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vllm_finds_a_scheme_and_every_parameter_of_every_module(
    tiny_folder: Path, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    folder = in_dtype(tiny_folder, tmp_path / "original", dtype)
    write(folder, tmp_path / "new", RECIPES[name])
    config = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    before, modules = load_file(folder / "model.safetensors"), modules_of(tmp_path / "new")
    assert config["quant_method"] == "compressed-tensors"
    assert scheme_of(config) == SCHEMES[RECIPES[name].scheme]
    assert len(modules) == 14
    for module, tensors in modules.items():
        rows, columns = before[f"{module}.weight"].shape
        assert fits(tensors, parameters_of(config, rows, columns)), module
        if "weight_shape" in tensors:
            assert tensors["weight_shape"].tolist() == [rows, columns]


@pytest.mark.parametrize("name", RECIPES)
def test_the_parts_of_a_fused_module_lie_one_below_the_other(
    tiny_folder: Path, tmp_path: Path, name: str
) -> None:
    """As vLLM loads them: into one parameter of all rows, at the row, or word of zero points, of each."""
    write(tiny_folder, tmp_path / "new", RECIPES[name])
    config = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    before, modules = load_file(tiny_folder / "model.safetensors"), modules_of(tmp_path / "new")
    for fused in FUSED.values():
        parent = "self_attn" if fused[0] == "q_proj" else "mlp"
        names = [f"model.layers.1.{parent}.{part}" for part in fused]
        shapes = [before[f"{one}.weight"].shape for one in names]
        wanted = parameters_of(config, sum(shape[0] for shape in shapes), shapes[0][1])
        assert fits(stacked([modules[one] for one in names]), wanted)


@pytest.mark.parametrize("name", RECIPES)
def test_vllm_parses_the_arguments_and_ignores_what_was_left_alone(
    tiny_folder: Path, tmp_path: Path, name: str
) -> None:
    """By compressed-tensors' own class, which refuses fields that it does not know."""
    arguments = pytest.importorskip("compressed_tensors.quantization").QuantizationArgs
    write(tiny_folder, tmp_path / "new", RECIPES[name])
    config = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    for given in (group_of(config)["weights"], group_of(config)["input_activations"]):
        if given is not None:
            parsed = arguments.model_validate(given)
            assert {key: getattr(parsed, key) for key in ("num_bits", "symmetric", "group_size")} == {
                key: given[key] for key in ("num_bits", "symmetric", "group_size")
            }
    tensors = read_tensors(tmp_path / "new")
    linear = {one.rpartition(".")[0] for one in tensors if "_proj." in one or one.startswith("lm_head.")}
    assert set(config["ignore"]) == linear - modules_of(tmp_path / "new").keys() == {"lm_head"}


def test_a_fused_module_is_ignored_whole_or_not_at_all(tiny_folder: Path, tmp_path: Path) -> None:
    """vLLM raises for one of which some parts are in its list."""
    with pytest.raises(LaminaError, match="v_proj"):
        write(tiny_folder, tmp_path / "new", Recipe(scheme="int8", ignore=("*.k_proj",)))
