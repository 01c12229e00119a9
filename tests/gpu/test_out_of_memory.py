"""What does not fit the GPU is refused with figures and remedies before any weight lies there."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lamina import Runtime
from lamina.common.errors import ConfigError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

# 128 layers of 16384: some 1.8 TB of weights, more than any GPU has.
TOO_LARGE = {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 128}


@pytest.fixture(autouse=True)
def _nothing_is_left_on_the_gpu() -> Iterator[None]:
    before = torch.cuda.memory_allocated()
    yield
    assert torch.cuda.memory_allocated() == before


def _folder_like(tiny_folder: Path, target: Path, **changes: Any) -> Path:
    config = json.loads((tiny_folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


def test_weights_that_do_not_fit_are_reported_with_the_remedies(tiny_folder: Path, tmp_path: Path) -> None:
    folder = _folder_like(tiny_folder, tmp_path, **TOO_LARGE)
    with pytest.raises(ConfigError, match=r"the weights take [\d.]+ GiB .*smaller dtype"):
        Runtime.from_pretrained(folder, load_format="dummy", device="cuda", dtype="bfloat16")


def test_a_cache_that_does_not_fit_is_reported_with_the_most_that_would(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_kv_blocks is 1000000000, .* wanted at most \d+"):
        Runtime.from_pretrained(tiny_folder, device="cuda", dtype="bfloat16", num_kv_blocks=10**9)


def test_a_fraction_that_leaves_no_room_is_reported_as_such(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="raise memory_fraction"):
        Runtime.from_pretrained(tiny_folder, device="cuda", dtype="bfloat16", memory_fraction=1e-6)
