"""What public tools store is read as they read it themselves, and our literal writers store the same.

by_tools.safetensors is of GPTQModel, bitsandbytes and modelopt (make_by_tools.py); compressed-tensors runs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from . import writers
from .make_by_tools import COLUMNS, ROWS, dense, order
from .test_dialects import DIALECTS, MODELOPT, NF4, awq, gptq
from .test_formats import format_of, kept
from .writers import Module

SHAPE = (ROWS, COLUMNS)
MODELOPT_FP8 = {"quant_method": "modelopt", **MODELOPT["quantization"]}  # type: ignore[dict-item]
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq v1": gptq(64).config,
    "gptq v2": gptq(128, 2).config,
    "gptq v1 with zero points": gptq(32, sym=False).config,
    "gptq v2 with zero points": gptq(32, 2, sym=False).config,
    "gptq v1 in an order": gptq(64, desc_act=True).config,
    "gptq v2 of rows": gptq(-1, 2, sym=False).config,
    "awq": awq(64).config,
    "nf4": NF4,
    "nf4, double": NF4,
    "fp4, double": {**NF4, "bnb_4bit_quant_type": "fp4"},
    "modelopt fp8": MODELOPT_FP8,
    "modelopt nvfp4": DIALECTS["modelopt nvfp4"].config,
}


@pytest.fixture(scope="module")
def stored() -> dict[str, dict[str, Tensor]]:
    """The tensors of each case, and "meant"."""
    cases: dict[str, dict[str, Tensor]] = {name: {} for name in CONFIGS}
    for path, tensor in load_file(Path(__file__).with_name("by_tools.safetensors")).items():
        name, _, key = path.rpartition("/")
        cases[name][key] = tensor
    return cases


@pytest.mark.parametrize("name", CONFIGS)
def test_modules_mean_what_their_tool_reads_in_them(stored: dict[str, dict[str, Tensor]], name: str) -> None:
    """GPTQModel rounds its products to the float16 of the scales."""
    tensors = dict(stored[name])
    meant = tensors.pop("meant")
    ours = kept(format_of(CONFIGS[name]), tensors, SHAPE)
    if name.startswith("gptq"):
        assert torch.equal(ours.to(torch.float16).float(), meant)
    else:
        assert torch.equal(ours, meant)
    assert (ours - dense()).norm() < 0.15 * dense().norm()


def gptq_in_order() -> Module:
    return writers.gptq(dense().numpy(), group=64, sym=True, version=1, group_of=order(64))


LITERAL: dict[str, Callable[[], Module]] = {
    "gptq v1": lambda: writers.gptq(dense().numpy(), group=64, sym=True, version=1),
    "gptq v2": lambda: writers.gptq(dense().numpy(), group=128, sym=True, version=2),
    "gptq v1 with zero points": lambda: writers.gptq(dense().numpy(), group=32, sym=False, version=1),
    "gptq v2 with zero points": lambda: writers.gptq(dense().numpy(), group=32, sym=False, version=2),
    "gptq v1 in an order": gptq_in_order,
    "gptq v2 of rows": lambda: writers.gptq(dense().numpy(), group=-1, sym=False, version=2),
    "awq": lambda: writers.awq(dense().numpy(), group=64),
    "modelopt fp8": lambda: writers.float8(
        dense().numpy(), by="tensor", like=lambda scales: scales.reshape(())
    ),
}


@pytest.mark.parametrize("name", LITERAL)
def test_literal_writers_store_the_tensors_of_the_tool(
    stored: dict[str, dict[str, Tensor]], name: str
) -> None:
    tensors, _ = LITERAL[name]()
    expected = {key: one for key, one in stored[name].items() if key != "meant"}
    assert tensors.keys() == expected.keys()
    for key, one in expected.items():
        assert tensors[key].dtype == one.dtype
        assert torch.equal(tensors[key].float(), one.float()), key


def test_the_literal_writer_of_nf4_chooses_the_numbers_of_bitsandbytes(
    stored: dict[str, dict[str, Tensor]],
) -> None:
    tensors, _ = writers.nf4(dense().numpy(), nested=False)
    for key in ("weight", "weight.absmax"):
        assert torch.equal(tensors[key], stored["nf4"][key])


def test_the_literal_writer_of_nvfp4_stores_the_scales_of_modelopt(
    stored: dict[str, dict[str, Tensor]],
) -> None:
    """Numbers halfway between two are rounded otherwise."""
    tensors, _ = writers.nvfp4(dense().numpy(), modelopt=True)
    theirs = stored["modelopt nvfp4"]
    torch.testing.assert_close(tensors["weight_scale_2"], theirs["weight_scale_2"])
    assert (tensors["weight_scale"].float() == theirs["weight_scale"].float()).float().mean() > 0.98
    assert (tensors["weight"] == theirs["weight"]).float().mean() > 0.95


@pytest.mark.parametrize("name", [name for name in DIALECTS if name.startswith("compressed-tensors")])
def test_compressed_tensors_decompresses_what_it_compressed_to_what_we_keep(name: str) -> None:
    """By the tool's own formula of scales, its own words, and its own way back."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    config = DIALECTS[name].config
    (group,) = config["config_groups"].values()
    scheme = quantization.QuantizationScheme(**group)
    weight = torch.cat([dense() * factor for factor in (1, 3, 0.2, 1, 7)])
    state = {"weight": weight, **parameters(scheme.weights, weight)}
    compressor = compressors.BaseCompressor.get_value_from_registry(config["format"])
    held = compressor.compress(dict(state), scheme)
    meant = compressor.decompress(dict(held), scheme)["weight"].float()
    ours = kept(format_of(config), held, tuple(weight.shape))
    if "nvfp4" in name:  # which the tool rounds to bfloat16
        torch.testing.assert_close(ours, meant, rtol=2**-7, atol=0)
    elif "zero points" in name:  # (number - 8) * scale + (8 - zero) * scale
        torch.testing.assert_close(ours, meant, rtol=0, atol=1e-6 * float(meant.abs().max()))
    else:
        assert torch.equal(ours, meant)
    assert (ours - weight).norm() < 0.15 * weight.norm()


def parameters(weights: Any, weight: Tensor) -> dict[str, Tensor]:
    """Scale and zero point of each group by the tool's formulas; rows are more than a block of 128."""
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    rows, columns = weight.shape
    sizes = {"tensor": (rows, columns), "channel": (1, columns), "block": (128, 128)}
    row_size, column_size = sizes.get(weights.strategy, (1, weights.group_size))
    bands = [[band.aminmax() for band in rows_.split(column_size, dim=1)] for rows_ in weight.split(row_size)]
    low, high = (torch.tensor([[pair[i] for pair in band] for band in bands]) for i in (0, 1))
    of_all = {}
    if weights.strategy == "tensor_group":
        of_all = {"global_scale": utils.generate_gparam(weight.amin(), weight.amax())}
    scale, zero = utils.calculate_qparams(low, high, weights, **of_all)
    if weights.strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    found = {"weight_scale": scale, "weight_zero_point": zero}
    return found | {f"weight_{name}": one.reshape(1) for name, one in of_all.items()}
