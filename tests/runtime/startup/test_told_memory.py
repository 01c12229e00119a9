"""What a model takes is told before it is loaded: all its tensors afterwards, within two in a hundred."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lamina import Runtime
from lamina.common.progress import say_nothing
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.startup.loader import sizing

from ...models.checkpoints.quantized.test_dialects import DIALECTS

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
WAYS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "bfloat16, tied": {"tie_word_embeddings": True},
    **{f"online {name}": {"quantization": name} for name in ("int8", "fp8", "fp8_block", "w4a16", "w8a16")},
    "online int8, tied": {"quantization": "int8", "tie_word_embeddings": True},
    **{
        name: {"quantization_config": DIALECTS[name].config}
        for name in (
            *("gptq, groups of 128", "gptq, zero points", "awq, groups of 64", "compressed-tensors w8a8"),
            *("compressed-tensors float8 by tensor", "fp8 by block", "compressed-tensors nvfp4", "nf4"),
        )
    },
    "gptq, an order of columns": {
        "quantization_config": DIALECTS["gptq, groups of 128"].config | {"desc_act": True}
    },
}


def bytes_of_tensors() -> dict[int, int]:
    """Of every storage that a living tensor has, by its address; those of a tracer have none."""
    gc.collect()
    found = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type == "cpu" and one.numel():
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


@pytest.mark.parametrize(
    "way, kv_cache_dtype",
    [*((way, "auto") for way in WAYS), *((way, "fp8") for way in ("bfloat16", "online fp8", "nf4"))],
)
def test_tensors_take_what_was_told(tmp_path: Path, way: str, kv_cache_dtype: str) -> None:
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "device": "cpu",
        "compile": False,
        "dtype": "bfloat16",
        "num_kv_blocks": 512,
        "block_size": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "kv_cache_dtype": kv_cache_dtype,
    }
    own = dict(WAYS[way])
    settings |= {"quantization": own.pop("quantization", None)}
    (tmp_path / "config.json").write_text(json.dumps(MODEL | own))
    told = sizing(RuntimeConfig(model=tmp_path, **settings), say_nothing)
    expected = told.weight_bytes + told.num_blocks * told.block_size * told.token_bytes
    before = bytes_of_tensors()
    with Runtime.from_pretrained(tmp_path, **settings) as runtime:
        after = bytes_of_tensors()
        assert runtime.stats()["blocks"]["total"] + 1 == told.num_blocks
    taken = sum(size for address, size in after.items() if address not in before)
    assert 0.98 < taken / expected < 1.02, (taken, expected)
