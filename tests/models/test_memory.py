"""Host memory while a checkpoint is read: the weights, and little beside them."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lamina.models import find_model
from lamina.models.config import read_model_config

ROOT = Path(__file__).parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "dtype": "bfloat16",
}
# What is held at once beside the weights does not grow with a model, so it is made small for a small model.
SCRIPT = """
import re, sys
from pathlib import Path
import gguf, torch
from lamina.common.store import Store
from lamina.models import ParameterSpec, find_model
from lamina.models.checkpoints import gguf_file, loaded_weights, weights
from lamina.models.checkpoints.read_ahead import ReadAhead
from lamina.models.quantization.model_schemes import uniform
from lamina.models.quantization.scheme import find_scheme
from lamina.models.config import read_model_config
from lamina.models.checkpoints.source import resolve_source

def memory(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

weights.MAPPED_BYTES, gguf_file.CHUNK_ELEMENTS, loaded_weights.CHUNK_ELEMENTS = 1 << 22, 1 << 18, 1 << 16
gguf.dequantize(gguf.quantize(torch.zeros(1, 32).numpy(), gguf.GGMLQuantizationType.Q8_0),
                gguf.GGMLQuantizationType.Q8_0)
small = ParameterSpec(shape=(64, 64), sources=("w",), projection=True)
into = {"dtype": torch.bfloat16, "device": "cpu"}
scheme = find_scheme("int8" if sys.argv[3:] == ["int8"] else None)
ones = torch.ones(64, 64, dtype=torch.bfloat16)
loaded_weights.LoadedWeights(uniform(find_scheme("int8"), {"w": small}), **into).take("w", 0, ones)
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
folder = resolve_source(sys.argv[1], store=Store(Path(sys.argv[2])))
config = read_model_config(folder)
model = find_model(config.architecture)
checkpoint = weights.read_checkpoint(model, config, folder)
ahead = ReadAhead(torch.device("cpu"), buffer_bytes=1 << 18) if sys.argv[3:] == ["ahead"] else None
into |= {"schemes": uniform(scheme, checkpoint.specs), "read_ahead": ahead}
held = weights.load_weights(checkpoint, **into).by_name
print(memory("VmHWM") - before, sum(weight.nbytes for weight in held.values()))
"""


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    config = read_model_config(folder)
    specs = find_model(config.architecture).parameters(config).values()
    return {name: shape for spec in specs for name, shape in spec.source_shapes.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def safetensors(folder: Path) -> Path:
    ones = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in _shapes(folder).items()}
    save_file(ones, folder / "model.safetensors")
    return folder


@pytest.fixture
def gguf_q8(folder: Path) -> Path:
    path, kind = folder / "model.gguf", gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_context_length(2048)
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, CONFIG["num_hidden_layers"])
    for name, shape in _shapes(folder).items():
        target = names.get_name(name, try_suffixes=(".weight",))
        if len(shape) == 1:
            writer.add_tensor(target, np.ones(shape, dtype=np.float32))
        else:
            rows = np.zeros((shape[0], shape[1] // 32 * 34), dtype=np.uint8)
            writer.add_tensor(target, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "kind, how",
    [("safetensors", []), ("gguf_q8", []), ("safetensors", ["int8"]), ("safetensors", ["ahead"])],
)
def test_the_peak_is_at_most_a_tenth_above_the_weights(
    kind: str, how: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(kind)
    child = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(source), str(tmp_path / "store"), *how],
        env={"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    peak, weights = map(int, child.stdout.split())
    assert weights > (150e6 if how == ["int8"] else 300e6)
    assert peak <= 1.1 * weights
