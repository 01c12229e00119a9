"""What a GGUF file declares and does not hold, or holds otherwise, is refused before anything is written."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from lamina.common.errors import LoadError, UnsupportedError
from lamina.common.store import Store
from lamina.models.checkpoints.gguf import convert_gguf

from .test_gguf import write_gguf


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.mark.parametrize(
    "scaling, lacks",
    [
        ({"type": "longrope"}, "rope_factors_long.weight are missing"),
        ({"type": "linear"}, "'linear', and rope.scaling.factor is missing"),
        ({"type": "yarn", "original_context_length": 64}, "'yarn', and rope.scaling.factor is missing"),
        ({"original_context_length": 64}, "context_length 256 is above .*original_context_length 64"),
        ({"type": "none", "original_context_length": 64}, "nothing says how its rope is scaled"),
    ],
    ids=str,
)
def test_a_long_context_without_its_numbers_is_refused_by_name(
    tiny_folder: Path, tmp_path: Path, store: Store, scaling: dict[str, Any], lacks: str
) -> None:
    def declare(writer: gguf.GGUFWriter) -> None:
        for name, value in scaling.items():
            add = writer.add_string if isinstance(value, str) else writer.add_uint32
            add(f"llama.rope.scaling.{name}", value)

    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder, fields=declare)
    with pytest.raises(UnsupportedError, match=lacks):
        convert_gguf(path, store, dtype=torch.float32)


def test_a_part_of_a_split_file_names_all_parts_and_what_joins_them(tmp_path: Path, store: Store) -> None:
    """Only the first part says what the model is."""
    path = tmp_path / "model-00002-of-00003.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.kv_data = [{}]
    writer.add_uint16("split.no", 1)
    writer.add_uint16("split.count", 3)
    writer.add_tensor("blk.0.ffn_up.weight", np.ones((2, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    wanted = r"one of 3 parts .* model-00001-of-00003.gguf to model-00003-of-00003.gguf; join them"
    with pytest.raises(UnsupportedError, match=wanted):
        convert_gguf(path, store, dtype=torch.float32)


def test_a_size_that_the_tensors_do_not_have_is_refused_before_anything_is_written(
    tiny_folder: Path, tmp_path: Path, store: Store
) -> None:
    path = write_gguf(
        tmp_path / "tiny.gguf", tiny_folder, extra={"output.weight": np.ones((320, 32), dtype=np.float32)}
    )
    with pytest.raises(LoadError, match=r"lm_head.weight in .*tiny.gguf has shape \[320, 32\]"):
        convert_gguf(path, store, dtype=torch.float32)
    assert not list(tmp_path.glob("store/**/model.safetensors"))
