"""Damaged and hostile checkpoints, and configs of what is not served: refused by tensor, field and value."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lamina import LaminaError, LoadError, UnsupportedError
from lamina.models.checkpoints.quantized.configs import READERS, read_dialect
from lamina.models.checkpoints.quantized.modules import quantized_modules
from lamina.models.checkpoints.weights import load_weights, read_checkpoint
from lamina.models.config import read_model_config
from lamina.models.fields import Fields
from lamina.models.registry import find_model

from . import writers
from .writers import PACKED

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}


def read(folder: Path) -> Any:
    config = read_model_config(folder)
    return read_checkpoint(find_model(config.architecture), config, folder)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_weights(read(folder), dtype=dtype, device="cpu")


def edited(folder: Path, name: str, edit: Callable[[Tensor], Tensor | None]) -> None:
    path = folder / "model.safetensors"
    held: dict[str, Tensor | None] = dict(load_file(path))
    given = held[name]
    assert given is not None
    held[name] = edit(given)
    save_file({key: one.contiguous() for key, one in held.items() if one is not None}, path)


def nan_first(tensor: Tensor) -> Tensor:
    tensor.view(-1)[0] = torch.nan
    return tensor


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("weight_packed", lambda t: None, "lacks .*weight_packed, which its config calls for"),
        ("weight_scale", lambda t: None, "lacks .*weight_scale, which its config calls for"),
        (
            "weight_scale",
            lambda t: t[:, :1],
            r"has shape \[128, 1\]; .* calls for \[128, 2\]",
        ),
        ("weight_scale", lambda t: t.T, r"weight_scale in .* has shape \[2, 128\]"),
        ("weight_scale", lambda t: t.double(), "weight_scale in .* has dtype F64"),
        ("weight_scale", nan_first, r"up_proj\.weight_scale holds values that are not finite"),
        (
            "weight_packed",
            lambda t: t.view(torch.uint8),
            "weight_packed in .* has dtype U8",
        ),
        ("weight_packed", lambda t: t[:-1], r"weight_packed in .* has shape \[127, 8\]"),
        ("weight_shape", lambda t: t + 1, r"up_proj has a weight_shape of \[129, 65\]"),
        ("weight_shape", lambda t: t.float(), "weight_shape in .* has dtype F32"),
    ],
)
def test_damaged_files_are_refused_by_the_name_of_the_tensor(
    source: Path, tmp_path: Path, name: str, edit: Callable[[Tensor], Tensor | None], message: str
) -> None:
    folder, _ = writers.save(tmp_path, source, PACKED)
    edited(folder, f"model.layers.1.mlp.up_proj.{name}", edit)
    with pytest.raises(LoadError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", torch.ones(128, 64), "gives no place: .*up_proj.weight"),
        ("model.layers.1.mlp.up_proj.qweight", torch.ones(4, 4), "gives no place: .*up_proj.qweight"),
        (
            "model.layers.1.mlp.up_proj.weight_zero_point",
            torch.ones(16, 2),
            "zero_point other than zero though",
        ),
        ("model.layers.1.mlp.up_proj.bias", torch.ones(128), "up_proj.bias in .* is not all zero"),
        ("lm_head.weight_scale", torch.ones(320, 1), "gives no place: lm_head.weight_scale"),
    ],
)
def test_tensors_beyond_the_format_are_refused_by_name(
    source: Path, tmp_path: Path, name: str, tensor: Tensor, message: str
) -> None:
    folder, _ = writers.save(tmp_path, source, PACKED)
    save_file(load_file(folder / "model.safetensors") | {name: tensor}, folder / "model.safetensors")
    with pytest.raises(LoadError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (torch.zeros(64, 128, dtype=torch.float8_e4m3fnuz), "down_proj.weight in .* has dtype F8_E4M3FNUZ"),
        (torch.zeros(64, 128, dtype=torch.float8_e5m2), "down_proj.weight in .* has dtype F8_E5M2"),
        (torch.zeros(64, 128, dtype=torch.int8), "down_proj.weight in .* has dtype I8; .* calls for F8_E4M3"),
        (torch.zeros(64, 128), "down_proj.weight in .* has dtype F32; .* calls for F8_E4M3"),
        (torch.zeros(64, 64, dtype=torch.float8_e4m3fn), r"down_proj.weight in .* has shape \[64, 64\]"),
    ],
)
def test_weights_of_another_dtype_than_float8_are_refused_by_name(
    source: Path, tmp_path: Path, kept: Tensor, message: str
) -> None:
    write = partial(writers.float8, by="tensor", like=lambda scales: scales.reshape(()))
    dialect = writers.Dialect(config={"quant_method": "fp8"}, write=write, scheme="fp8")
    folder, _ = writers.save(tmp_path, source, dialect)
    edited(folder, "model.layers.1.mlp.down_proj.weight", lambda tensor: kept)
    with pytest.raises(LoadError, match=message):
        load(folder)


def test_float8_without_a_config_that_says_so_is_refused(source: Path, tmp_path: Path) -> None:
    dialect = writers.Dialect(config={}, write=partial(writers.float8, by="tensor"), scheme=None)
    folder, _ = writers.save(tmp_path, source, dialect)
    path = folder / "model.safetensors"
    held = {name: one for name, one in load_file(path).items() if not name.endswith("weight_scale")}
    save_file(held, path)
    with pytest.raises(LoadError, match=r"proj.weight in .* has dtype torch.float8_e4m3fn; wanted"):
        load(folder)


def test_columns_in_two_orders_of_one_projection_are_refused(source: Path, tmp_path: Path) -> None:
    config = GPTQ | {"desc_act": True}
    orders = [torch.arange(64) // 32, torch.arange(64) % 2]

    def write(weight: Any) -> Any:
        columns = weight.shape[1]
        order = (torch.arange(columns) % (columns // 32)).numpy()
        return writers.gptq(weight, group=32, sym=True, version=1, group_of=order)

    folder, _ = writers.save(tmp_path, source, writers.Dialect(config=config, write=write, scheme="w4a16"))
    assert load(folder).by_name["layers.0.qkv%order"][:3].tolist() == [0, 2, 4]
    edited(folder, "model.layers.0.self_attn.k_proj.g_idx", lambda tensor: orders[0].to(torch.int32))
    with pytest.raises(UnsupportedError, match=r"columns of layers\.0\.qkv are in one order for"):
        load(folder)


def test_scales_of_the_kv_cache_are_read_under_each_of_their_names(source: Path, tmp_path: Path) -> None:
    folder, _ = writers.save(tmp_path, source, PACKED)
    attention = "model.layers.{}.self_attn"
    scales = {
        f"{attention.format(0)}.k_proj.k_scale": torch.tensor(0.5),
        f"{attention.format(0)}.attn.v_scale": torch.tensor([0.25, 0.75], dtype=torch.bfloat16),
        f"{attention.format(1)}.kv_scale": torch.tensor([2.0]),
        f"{attention.format(1)}.q_scale": torch.tensor([3.0]),
    }
    save_file(load_file(folder / "model.safetensors") | scales, folder / "model.safetensors")
    kept = {name: scale.tolist() for name, scale in load(folder).kv_scales.items()}
    assert kept == {
        "layers.0.k_scale": [0.5],
        "layers.0.v_scale": [0.25, 0.75],
        "layers.1.k_scale": [2.0],
        "layers.1.v_scale": [2.0],
    }


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.tensor([0.0]), "k_scale is .*wanted numbers above zero"),
        (torch.tensor([torch.nan]), "k_scale is .*wanted numbers above zero"),
        (torch.tensor([-1.0, 1.0]), "k_scale is .*wanted numbers above zero"),
        (torch.ones(3), r"k_scale has shape \[3\]; wanted one scale, or one for each of 2 heads"),
    ],
)
def test_scales_of_the_kv_cache_that_cannot_be_are_refused_by_name(
    source: Path, tmp_path: Path, scale: Tensor, message: str
) -> None:
    folder, _ = writers.save(tmp_path, source, PACKED)
    own = {"model.layers.0.self_attn.k_scale": scale}
    save_file(load_file(folder / "model.safetensors") | own, folder / "model.safetensors")
    with pytest.raises(LoadError, match=message):
        load(folder)


def test_scales_rounded_to_the_dtype_of_the_runtime_are_measured(source: Path, tmp_path: Path) -> None:
    folder, _ = writers.save(tmp_path, source, PACKED)
    weights = load(folder, torch.bfloat16)
    assert weights.by_name["layers.0.qkv%scale"].dtype == torch.bfloat16
    assert 1e-4 < weights.total_error().relative_rms < 2**-8
    (sentence,) = weights.sentences()
    assert (
        "quantization w4a16: 8 projections in four bits a weight, a scale for 32 columns, off by" in sentence
    )


NOTHING: dict[str, Any] = {"quant_method": None}
FP8 = {"quant_method": "fp8"}


def of_weights(**changes: Any) -> dict[str, Any]:
    """A config of compressed-tensors whose weights are said to be otherwise."""
    group = PACKED.config["config_groups"]["group_0"]
    weights = group["weights"] | changes
    return PACKED.config | {"config_groups": {"group_0": group | {"weights": weights}}}


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (NOTHING | {"bits": 4}, "quant_method is None.* 'gptq', 'awq'"),
        ({"quant_method": "aqlm"}, "quant_method is 'aqlm'"),
        (GPTQ | {"bits": 8}, "bits is 8.*served is 4"),
        (GPTQ | {"bits": 3}, "bits is 3"),
        (GPTQ | {"bits": "4"}, "bits is '4'; wanted an integer"),
        (GPTQ | {"group_size": 48}, "group_size is 48; served are 32, 64, 128"),
        (GPTQ | {"checkpoint_format": "gptq_p"}, "checkpoint_format is 'gptq_p'"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (GPTQ | {"dynamic": {"+:.*q_proj": {"bits": 8}}}, "bits is 8"),
        (
            GPTQ | {"modules_in_block_to_quantize": 3},
            "modules_in_block_to_quantize is 3; wanted lists of names",
        ),
        (GPTQ | {"dynamic": {"-:(": {}}}, r"dynamic is '\('; wanted a regular expression"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'.*'gemm'"),
        (AWQ | {"bits": 3}, "bits is 3"),
        (AWQ | {"zero_point": False}, "zero_point is False"),
        (FP8 | {"weight_block_size": [64, 128]}, r"weight_block_size is \[64, 128\]"),
        (FP8 | {"activation_scheme": "tensorwise"}, "activation_scheme is 'tensorwise'"),
        (FP8 | {"fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'.*'NVFP4'"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_8bit is True.*load_in_4bit"),
        (PACKED.config | {"format": "marlin-24"}, "format is 'marlin-24'"),
        (PACKED.config | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: format"),
        (PACKED.config | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        (PACKED.config | {"config_groups": {"W8A8": ["Linear"]}}, r"config_groups\.W8A8"),
        (PACKED.config | {"ignore": ["re:("]}, r"ignore is '\('; wanted a regular expression"),
        (of_weights(num_bits=3), "weights: num_bits is 3"),
        (of_weights(group_size=16), "group_size is 16; served are"),
        (of_weights(strategy="tensor"), "strategy is 'tensor'"),
        (of_weights(actorder="dynamic"), "actorder is 'dynamic'"),
        (of_weights(type="complex"), "type is 'complex'"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_field_and_value(
    config: dict[str, Any], field: str, source: Path, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(json.loads((source / "config.json").read_text()) | {"quantization_config": config})
    )
    model = read_model_config(tmp_path)
    specs = find_model(model.architecture).parameters(model)
    with pytest.raises(LaminaError, match=rf"config\.json.*{field}") as raised:
        quantized_modules(read_dialect(tmp_path), specs)
    assert not isinstance(raised.value, LoadError)


def test_columns_that_are_no_whole_groups_are_refused_by_the_name_of_the_parameter(
    make_tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_tiny_folder(intermediate_size=48)
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": PACKED.config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(load_file(source / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"cannot keep \(64, 48\); wanted columns by groups of 32"):
        read(tmp_path)


def test_activations_beyond_a_bound_count_as_the_bound() -> None:
    weight = torch.randn(16, 32)
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 0.5}
    form = READERS["fbgemm_fp8"](Fields(config, "config.json")).format_of("model.layers.0.mlp.down_proj")
    assert form is not None
    multiply = form.scheme.multiply
    assert multiply is not None
    tensors, _ = writers.float8(weight.numpy(), by="channel")
    parts = [part.contiguous() for part in form.unpack(tensors, (16, 32))]
    x = torch.randn(4, 32) * 3
    assert torch.equal(multiply(x, parts, None), multiply(x.clamp(-0.5, 0.5), parts, None))
    assert not torch.equal(multiply(x, parts, None), multiply(x.clamp(-0.6, 0.6), parts, None) * 2)
