"""Weights quantized on a GPU and on a CPU, and GGUF files whose blocks a GPU keeps."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lamina import Runtime, SamplingParams
from lamina.common.store import Store
from lamina.models.checkpoints.gguf import convert_gguf
from lamina.models.checkpoints.gguf_tokenizer import TOKENIZER_ERROR
from lamina.models.quantization.scheme import find_scheme, scheme_names

from ..models.checkpoints.test_gguf import KIND, write_gguf

pytestmark = pytest.mark.gpu
PROMPTS = [[5, 9, 33, 2], [*range(1, 80)]]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}


def bits(part: Tensor) -> Tensor:
    """A part's bytes, on the CPU."""
    return part.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", [name for name in scheme_names() if "cuda" in find_scheme(name).devices])
def test_rows_become_the_same_bits_on_every_device(name: str) -> None:
    scheme = find_scheme(name)
    rows = torch.randn(256, 1024) * torch.rand(256, 1)
    table = scheme.tensors((256, 1024), torch.bfloat16)
    stored = []
    for device in ("cpu", "cuda"):
        parts = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in table.values()]
        scheme.store(rows.to(device), parts)
        stored.append([bits(part) for part in parts])
    for on_cpu, on_gpu in zip(*stored, strict=True):
        assert torch.equal(on_cpu, on_gpu)


@pytest.mark.parametrize("kind, scheme", [(KIND.Q4_0, "w4a16"), (KIND.Q8_0, "w8a16")])
def test_a_gguf_file_keeps_its_blocks_and_says_what_its_dequantized_weights_say(
    kind: KIND, scheme: str, make_tiny_folder: Callable[..., Path], tmp_path: Path, compile_cache: Path
) -> None:
    """In float16, in which scales and weights are equal to the bit."""
    path = write_gguf(tmp_path / "wide.gguf", make_tiny_folder(**WIDE), kind=kind)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    found = []
    for way in ("groups", None):
        converted = convert_gguf(
            path, Store(tmp_path / "store"), dtype=torch.float16, kept_as=way, needs_tokenizer=False
        )
        folder = shutil.copytree(
            converted, tmp_path / str(way), ignore=shutil.ignore_patterns(TOKENIZER_ERROR)
        )
        with Runtime.from_pretrained(
            folder, device="cuda", dtype="float16", num_kv_blocks=64, cache_dir=compile_cache
        ) as runtime:
            kept = runtime.stats()["quantization"]
            assert way is None or {one["scheme"] for one in kept["tensors"].values()} == {scheme}
            answers = runtime.generate(PROMPTS, params)
        found.append([answer.outputs[0].logprobs[0] for answer in answers])
    for ours, dense in zip(*found, strict=True):
        shared = ours.keys() & dense.keys()
        assert len(shared) >= 3
        for token_id in shared:
            assert abs(ours[token_id].logprob - dense[token_id].logprob) < 0.05
