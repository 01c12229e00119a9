"""Random checkpoints and adapters of a LLaMA shape, where a benchmark has to read files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

STD = 0.02  # of a random weight


def projections(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The modules of one layer that adapters change: rows and columns."""
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    return {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def write_checkpoint(folder: Path) -> Path:
    """Beside the folder's config.json, a file of random weights for each layer and one for the rest."""
    config = json.loads((folder / "config.json").read_text())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(_parts(config, device)):
        name = f"model-{number:05}.safetensors"
        save_file({key: tensor.cpu() for key, tensor in tensors.items()}, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _parts(config: dict[str, Any], device: str) -> Iterator[dict[str, Tensor]]:
    def random(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=STD)

    def ones() -> Tensor:
        return torch.ones(hidden, dtype=torch.bfloat16)

    hidden = config["hidden_size"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        own = {f"{prefix}{name}.weight": random(*shape) for name, shape in projections(config).items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        yield own | {f"{prefix}{name}.weight": ones() for name in norms}
    rest = {"model.embed_tokens.weight": random(config["vocab_size"], hidden), "model.norm.weight": ones()}
    if not config["tie_word_embeddings"]:
        rest["lm_head.weight"] = random(config["vocab_size"], hidden)
    yield rest


def write_adapters(model: Path, folder: Path, *, count: int, rank: int) -> list[Path]:
    """So many adapters of all projections of a model, with the same random matrices and other factors."""
    config = json.loads((model / "config.json").read_text())
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (rows, columns) in projections(config).items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, columns, dtype=torch.bfloat16) * STD
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, rank, dtype=torch.bfloat16) * STD
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "matrices.safetensors")
    return [_write_adapter(folder, number, rank, config) for number in range(count)]


def _write_adapter(folder: Path, number: int, rank: int, config: dict[str, Any]) -> Path:
    own = folder / f"adapter-{number}"
    own.mkdir(exist_ok=True)
    modules = [name.rpartition(".")[2] for name in projections(config)]
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank + number, "target_modules": modules}
    (own / "adapter_config.json").write_text(json.dumps(described))
    (own / "adapter_model.safetensors").unlink(missing_ok=True)
    (own / "adapter_model.safetensors").hardlink_to(folder / "matrices.safetensors")
    return own
