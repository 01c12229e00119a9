"""The GPU workloads: LLaMA shapes, random weights and seeded token ids, the same for every engine."""

import json
import random
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "8b half": {  # what each of two ranks computes of 8b
        "hidden_size": 4096,
        "intermediate_size": 7168,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 64128,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "tiny": {  # to try a script out
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}
COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


def write_config(shape: str, folder: Path) -> Path:
    """A folder with nothing but the config.json of a shape."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(COMMON | SHAPES[shape]))
    return folder


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Random token ids, `count` prompts of one length."""
    source = random.Random(seed)
    return [[source.randrange(1000, 120000) for _ in range(length)] for _ in range(count)]


def mixed(
    count: int = 256, seed: int = 0, low: int = 100, high: int = 1024
) -> tuple[list[list[int]], list[int]]:
    """Prompts of low to high tokens with an output length each: offline throughput as others publish it."""
    source = random.Random(seed)
    inputs = [
        [source.randrange(1000, 120000) for _ in range(source.randint(low, high))] for _ in range(count)
    ]
    return inputs, [source.randint(low, high) for _ in range(count)]


def weights_read(shape: str) -> int:
    """Parameters that one decode step reads: every layer and the LM head."""
    sizes = SHAPES[shape]
    hidden, width = sizes["hidden_size"], sizes["head_dim"]
    qkv = hidden * width * (sizes["num_attention_heads"] + 2 * sizes["num_key_value_heads"])
    o = sizes["num_attention_heads"] * width * hidden
    layer = qkv + o + 3 * hidden * sizes["intermediate_size"] + 2 * hidden
    return int(sizes["num_hidden_layers"] * layer + sizes["vocab_size"] * hidden)


def bytes_read(shape: str, quantization: str | None = None) -> float:
    """Bytes of weights that one decode step reads: the LM head in bfloat16, projections as they are kept."""
    head = SHAPES[shape]["vocab_size"] * SHAPES[shape]["hidden_size"]
    bytes_each = {None: 2.0, "fp8": 1.0, "int8": 1.0, "w4a16": 0.5 + 2 / 128, "w8a16": 1 + 2 / 32}[
        quantization
    ]
    return 2.0 * head + bytes_each * (weights_read(shape) - head)


def cache_bytes_per_token(shape: str) -> int:
    """Bytes of keys and values of one token in bfloat16."""
    sizes = SHAPES[shape]
    return int(4 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"])
