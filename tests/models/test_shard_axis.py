"""Shard axes: two devices, each with its share of every parameter, compute what one computes."""

import dataclasses
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.common.errors import ConfigError
from lamina.custom_ops.paged_attention.reference import dense_attention
from lamina.models import ParameterSpec, find_model
from lamina.models.checkpoints.weights import load_weights, read_checkpoint
from lamina.models.config import ModelConfig, read_model_config
from lamina.models.layers import FAST_OPS, Ops
from lamina.models.registry import ModelDefinition
from lamina.models.rope import rotation_tables

from ..families import FAMILIES

NUM_DEVICES = 2
PROMPT = [(37 * i) % 317 + 3 for i in range(24)]


class Sum:
    """The sum of what every device gives, handed to each of them."""

    def __init__(self) -> None:
        self.given: dict[int, Tensor] = {}
        self.barrier = threading.Barrier(NUM_DEVICES)

    def __call__(self, device: int, value: Tensor) -> Tensor:
        self.given[device] = value
        self.barrier.wait()
        total = torch.stack([self.given[number] for number in range(NUM_DEVICES)]).sum(0)
        self.barrier.wait()
        return total


def share(spec: ParameterSpec, weight: Tensor, device: int) -> Tensor:
    if spec.shard_axis is None:
        return weight
    parts = weight.split(spec.part_rows) if spec.shard_axis == 0 else [weight]
    return torch.cat([part.chunk(NUM_DEVICES, spec.shard_axis)[device] for part in parts])


def run(model: ModelDefinition, config: ModelConfig, weights: Mapping[str, Tensor], ops: Ops) -> Tensor:
    specs = model.attention(config)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        spec = specs[layer]
        mask: dict[str, Any] = {"window": spec.window or -1, "chunk": spec.chunk or -1}
        out.copy_(dense_attention(query, key, value, spec.scale, **mask, soft_cap=spec.soft_cap or 0.0))

    ids, positions = (torch.tensor(values, dtype=torch.int32) for values in (PROMPT, range(len(PROMPT))))
    with torch.inference_mode():
        return model.logits(config, weights, model.forward(config, weights, ids, positions, attend, ops), ops)


def run_share(
    device: int, model: ModelDefinition, config: ModelConfig, weights: Mapping[str, Tensor], add: Sum
) -> Tensor:
    """This device's part of the logits; the embedding is looked up whole, as its rows are no computation."""
    specs = model.parameters(config)
    own = {
        name: share(specs[name], weight, device) if name in specs and name != "embedding" else weight
        for name, weight in weights.items()
    }
    summed = {id(own[name]) for name, spec in specs.items() if spec.shard_axis == 1}

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor:
        if id(weight) not in summed:
            return FAST_OPS.linear(x, weight, bias)
        total = add(device, FAST_OPS.linear(x, weight))
        return total if bias is None else total + bias

    sizes = ("num_heads", "num_kv_heads", "intermediate_size")
    smaller = {name: getattr(config, name) // NUM_DEVICES for name in sizes}
    return run(model, dataclasses.replace(config, **smaller), own, FAST_OPS._replace(linear=linear))


@pytest.mark.parametrize("name", FAMILIES)
def test_two_devices_with_their_shares_compute_the_logits_of_one(name: str, tmp_path: Path) -> None:
    folder = FAMILIES[name].save(tmp_path)
    config = read_model_config(folder)
    model = find_model(config.architecture)
    into: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    weights = load_weights(read_checkpoint(model, config, folder), **into).by_name
    weights |= rotation_tables(config, max_model_len=len(PROMPT), **into)
    one_device = partial(run_share, model=model, config=config, weights=weights, add=Sum())
    with ThreadPoolExecutor(NUM_DEVICES) as pool:
        shares = list(pool.map(one_device, range(NUM_DEVICES)))
    whole = run(model, config, weights, FAST_OPS)
    torch.testing.assert_close(torch.cat(shares, dim=1), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_matrix_of_every_family_has_an_axis_and_no_norm_has(name: str, tmp_path: Path) -> None:
    config = read_model_config(FAMILIES[name].save(tmp_path))
    specs = find_model(config.architecture).parameters(config)
    for parameter, spec in specs.items():
        kind = parameter.rpartition(".")[2]
        expected = {"o": 1, "down": 1} if len(spec.shape) == 2 else {"qkv_bias": 0, "gate_up_bias": 0}
        assert spec.shard_axis == expected.get(kind, 0 if len(spec.shape) == 2 else None), parameter


@pytest.mark.parametrize("axis", [-1, 2, "rows"])
def test_an_axis_that_the_parameter_lacks_is_refused(axis: Any) -> None:
    with pytest.raises(ConfigError, match=r"shard_axis of \('w',\) is .*; wanted a dimension of shape"):
        ParameterSpec(shape=(4, 3), sources=("w",), shard_axis=axis)


def test_one_source_may_hold_all_parts() -> None:
    spec = ParameterSpec(shape=(8, 3), sources=("qkv",), rows=(4, 2, 2))
    assert spec.source_shapes == {"qkv": (8, 3)}
    assert spec.part_rows == (4, 2, 2)
