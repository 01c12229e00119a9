"""Weights of a GPU, read ahead through pinned buffers that are used again while it copies: those of a CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lamina.models.checkpoints.read_ahead import ReadAhead
from lamina.models.checkpoints.weights import load_weights, read_checkpoint
from lamina.models.config import read_model_config
from lamina.models.registry import find_model
from lamina.models.sharding import sharding_of

from ..families import FAMILIES

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
SIZES = {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 8192, "num_hidden_layers": 2}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own", [None, {"num_buffers": 2, "buffer_bytes": 1 << 18}], ids=["own", "small"])
def test_a_gpu_gets_what_a_cpu_does(
    tmp_path: Path, own: dict[str, int] | None, dtype: torch.dtype, ranks: int
) -> None:
    folder = FAMILIES["granite"].save(tmp_path, max_shard_size="30MB", **SIZES)
    config = read_model_config(folder)
    definition = find_model(config.architecture)
    checkpoint = read_checkpoint(definition, config, folder)
    schemes = checkpoint.schemes
    if ranks > 1:
        schemes = schemes.of_rank(sharding_of(definition, config, ranks))
    into: dict[str, Any] = {"dtype": dtype, "schemes": schemes, "rank": ranks - 1}
    wanted = load_weights(checkpoint, device="cpu", **into).by_name
    found = load_weights(checkpoint, device=GPU, read_ahead=own and ReadAhead(GPU, **own), **into)
    for name, tensor in wanted.items():
        assert torch.equal(found.by_name[name].cpu(), tensor), name
    held = {name: tensor.clone() for name, tensor in found.by_name.items()}
    for tensor in {*found.by_name.values()}:
        tensor.fill_(-1)
    load_weights(checkpoint, device=GPU, into=found, **into)
    assert all(torch.equal(found.by_name[name], tensor) for name, tensor in held.items())
