"""Shard axes: along which dimension ranks share out each parameter."""

from pathlib import Path
from typing import Any

import pytest

from lamina.common.errors import ConfigError
from lamina.models import ParameterSpec, find_model
from lamina.models.config import read_model_config

from ..families import FAMILIES


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
