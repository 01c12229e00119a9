"""How compressed-tensors lays out a quantized projection, and what config.json says of it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.safetensors_header import Layout
from ..quantization.packing import PER_WORD, pack_int4
from .grids import Fit
from .recipe import Recipe

FORMATS = {"fp8": "float-quantized", "int8": "int-quantized", "w4a16": "pack-quantized"}
KINDS = {"fp8": ("float", 8), "int8": ("int", 8), "w4a16": ("int", 4)}
ROWS_A_WORD = PER_WORD  # of zero points: rows that are packed apart must begin at a multiple of it
OFFSET = 8  # of four bits: what is packed is not negative


def layout(recipe: Recipe, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
    """Dtype and shape of each tensor of a projection [N, K], by what follows the module's name."""
    rows, columns = shape
    groups = columns // (recipe.columns or columns)
    scale = (dtype, (rows, groups))
    if recipe.scheme != "w4a16":
        stored = torch.float8_e4m3fn if recipe.scheme == "fp8" else torch.int8
        return {"weight": (stored, shape), "weight_scale": scale}
    parts: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "weight_packed": (torch.int32, (rows, -(-columns // PER_WORD))),
        "weight_scale": scale,
        "weight_shape": (torch.int64, (2,)),
    }
    if not recipe.symmetric:
        parts["weight_zero_point"] = (torch.int32, (-(-rows // PER_WORD), groups))
    return parts


def tensors(recipe: Recipe, codes: Tensor, fit: Fit, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of rows of a projection: all of its layout but the shape."""
    scale = {"weight_scale": fit.scale.to(dtype)}
    if recipe.scheme != "w4a16":
        stored = torch.float8_e4m3fn if recipe.scheme == "fp8" else torch.int8
        return {"weight": codes.to(stored), **scale}
    parts = {"weight_packed": pack_int4((codes + OFFSET).to(torch.int8), 1), **scale}
    if fit.zero is not None:
        parts["weight_zero_point"] = pack_int4((fit.zero + OFFSET).to(torch.int8), 0)
    return parts


def quantization_config(recipe: Recipe, ignored: Sequence[str]) -> dict[str, Any]:
    """The field of config.json by which other programs read the checkpoint."""
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": _arguments(recipe) | {"dynamic": False, "observer": "minmax"},
        "input_activations": None,
        "output_activations": None,
        "format": FORMATS[recipe.scheme],
    }
    if recipe.scheme != "w4a16":
        group["input_activations"] = _arguments(recipe) | {"strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": FORMATS[recipe.scheme],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _arguments(recipe: Recipe) -> dict[str, Any]:
    kind, num_bits = KINDS[recipe.scheme]
    return {
        "num_bits": num_bits,
        "type": kind,
        "symmetric": recipe.symmetric,
        "strategy": "group" if recipe.columns else "channel",
        "group_size": recipe.columns,
        "block_structure": None,
        "actorder": None,
    }
