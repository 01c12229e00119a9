"""A GGUF file of random blocks, of the kinds that llama.cpp mixes in Q4_K_M: there is nothing to fetch."""

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import workloads
from made_up_weights import projections

from lamina.custom_ops.linear_blocks.layout import KINDS, by_rows
from lamina.custom_ops.linear_blocks.runs import level

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WIDER = ("attn_v", "ffn_down")  # in Q6_K where has_more_bits says so
VOCABULARY = 32000


def has_more_bits(layer: int, num_layers: int) -> bool:
    """Whether a layer of Q4_K_M gets more bits: the first and the last eighth, else every third."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def write_gguf(path: Path, config: dict[str, Any]) -> Path:
    """Write the file of a LLaMA with these sizes."""
    writer, hidden, layers = (
        gguf.GGUFWriter(path, "llama"),
        config["hidden_size"],
        config["num_hidden_layers"],
    )
    writer.add_block_count(layers)
    writer.add_context_length(workloads.COMMON["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config["head_dim"])
    _add_blocks(writer, "token_embd", (config["vocab_size"], hidden), "Q6_K")
    for layer in range(layers):
        for name, shape in projections(config).items():
            is_wider = NAMES[name] in WIDER and has_more_bits(layer, layers)
            _add_blocks(writer, f"blk.{layer}.{NAMES[name]}", shape, "Q6_K" if is_wider else "Q4_K")
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(hidden, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_blocks(writer: gguf.GGUFWriter, name: str, shape: tuple[int, int], kind: str) -> None:
    drawn = torch.randint(0, 256, (shape[0], KINDS[kind].row_bytes(shape[1])), dtype=torch.uint8)
    level(drawn, kind)
    rows = by_rows(drawn, kind).numpy()
    writer.add_tensor(f"{name}.weight", rows, raw_dtype=gguf.GGMLQuantizationType[kind])


def main() -> None:
    """Write the file of a shape, with another number of layers and a small vocabulary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--shape", choices=workloads.SHAPES, default="1b")
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    sizes = {"num_hidden_layers": options.layers, "vocab_size": VOCABULARY}
    print(write_gguf(options.path, workloads.SHAPES[options.shape] | sizes))


if __name__ == "__main__":
    main()
