"""What a checkpoint of compressed-tensors stands for, by its format's rules written out."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's files by name, through the index where there is one."""
    tensors: dict[str, Tensor] = {}
    index = folder / "model.safetensors.index.json"
    shards = {"model.safetensors"}
    if index.exists():
        placed = json.loads(index.read_text())["weight_map"]
        shards = set(placed.values())
    for shard in sorted(shards):
        with safe_open(folder / shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                assert name not in tensors
                assert not index.exists() or placed[name] == shard
                tensors[name] = file.get_tensor(name)
    return tensors


def dequantized(folder: Path) -> dict[str, Tensor]:
    """The tensors of a plain checkpoint that a quantized one stands for; projections in float32."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    tensors = read_tensors(folder)
    modules = {name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")}
    parts = {
        module: {
            name.removeprefix(module + "."): tensors.pop(name)
            for name in [*tensors]
            if name.startswith(module + ".weight")
        }
        for module in modules
    }
    weights = {f"{module}.weight": _weight(own, group["weights"]) for module, own in parts.items()}
    return tensors | weights


def _weight(parts: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> Tensor:
    scale = parts["weight_scale"].float()
    if "weight_packed" not in parts:
        return parts["weight"].float() * scale
    rows, columns = parts["weight_shape"].tolist()
    codes = _unpacked(parts["weight_packed"].numpy(), columns) - 8
    group = arguments["group_size"] or columns
    zero = np.zeros((rows, columns // group), dtype=np.int64)
    if not arguments["symmetric"]:
        zero = _unpacked(parts["weight_zero_point"].numpy().T, rows).T - 8
    codes = codes - zero.repeat(group, axis=1)
    return torch.from_numpy(codes).float() * scale.repeat_interleave(group, dim=1)


def _unpacked(words: Any, count: int) -> Any:
    """[R, C] int32 as [R, count] numbers of four bits, the lowest first."""
    unsigned = words.astype(np.int64) & 0xFFFFFFFF
    return np.stack([(unsigned >> (4 * i)) & 15 for i in range(8)], axis=2).reshape(len(words), -1)[:, :count]
