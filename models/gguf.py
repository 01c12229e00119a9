"""Turns a GGUF file of a LLaMA into a checkpoint folder, once, in the store."""

import json
import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from ..common.errors import LoadError, UnsupportedError
from ..common.progress import Progress
from ..common.store import Store
from .config import ModelConfig
from .fields import Fields
from .gguf_file import GGUFFile, GGUFTensor, read_gguf
from .rope import llama3_divisors
from .rope_config import RopeConfig
from .weights import SINGLE_NAME

CONVERTER_VERSION = 1
FOLDER_KIND = "checkpoints"
CHUNK_ELEMENTS = 1 << 24  # dequantized at a time
SAFETENSORS_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
}
ROPE_DIVISORS = "rope_freqs.weight"

MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(path: Path, store: Store, *, dtype: torch.dtype, progress: Progress | None = None) -> Path:
    """The folder with this file's config, weights (in `dtype`) and tokenizer; made at the first call."""
    key = f"{_content_hash(path, store)}-v{CONVERTER_VERSION}-{str(dtype).removeprefix('torch.')}"
    with store.lock(f"{FOLDER_KIND}-{key}"):
        folder = store.folder(FOLDER_KIND, key)
        if folder is None:
            file = read_gguf(path)
            with store.new_folder(FOLDER_KIND, key) as new:
                _write_configs(file, new, dtype)
                _write_weights(file, new / SINGLE_NAME, dtype, progress)
                _write_tokenizer(file, new, store)
            folder = store.folder(FOLDER_KIND, key)
    assert folder is not None
    return folder


def _content_hash(path: Path, store: Store) -> str:
    """The hash of a file's content, remembered for as long as the file is not touched."""
    try:
        stat = path.stat()
        identity = f"{path.resolve()} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
        key = xxhash.xxh3_128_hexdigest(identity.encode())
        known = store.read_ref("gguf", key)
        if known is None:
            known = _hash(path)
            store.write_ref("gguf", key, known)
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error}") from error
    return str(known)


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return str(digest.hexdigest())


def _write_configs(file: GGUFFile, folder: Path, dtype: torch.dtype) -> None:
    config = checkpoint_config(file, dtype)
    ModelConfig.from_dict(config, origin=str(file.path))
    config = {name: value for name, value in config.items() if value is not None}
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id") if name in config}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def checkpoint_config(file: GGUFFile, dtype: torch.dtype) -> dict[str, Any]:
    """What the file's metadata says, in the fields of a config.json."""
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedError(
            f"{file.path} has architecture {architecture!r}; of GGUF files, 'llama' is supported"
        )
    metadata = Fields(file.metadata, str(file.path))
    if "token_embd.weight" not in file.tensors:
        raise LoadError(f"{file.path} lacks token_embd.weight")
    hidden_size, num_heads = (
        metadata.integer("llama.embedding_length"),
        metadata.integer("llama.attention.head_count"),
    )
    rotated = metadata.integer("llama.rope.dimension_count", hidden_size // num_heads)
    head_dim = metadata.integer("llama.attention.key_length", rotated)
    if rotated != head_dim:
        raise UnsupportedError(
            f"{file.path} rotates {rotated} of {head_dim} dimensions of a head, wanted all"
        )
    eos = [
        metadata.integer(f"tokenizer.ggml.{name}_token_id", None, minimum=0) for name in ("eos", "eot", "eom")
    ]
    eos_ids = list(dict.fromkeys(i for i in eos if i is not None))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer("llama.feed_forward_length"),
        "num_hidden_layers": metadata.integer("llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer("llama.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(metadata.number("llama.attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": metadata.integer("llama.context_length"),
        "rope_parameters": _rope_parameters(file, metadata),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "num_local_experts": file.metadata.get("llama.expert_count"),
        "sliding_window": file.metadata.get("llama.attention.sliding_window"),
        "dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": metadata.integer("tokenizer.ggml.bos_token_id", None, minimum=0),
        "eos_token_id": eos_ids or None,
    }


def _shortest(value: float) -> float:
    """The decimal that was meant by a float32, 1e-5 and not 9.999999747e-06."""
    return float(str(np.float32(value)))


def _rope_parameters(file: GGUFFile, metadata: Fields) -> dict[str, Any]:
    theta = _shortest(metadata.number("llama.rope.freq_base", 10000.0, positive=True))
    kind = metadata.text("llama.rope.scaling.type", "none")
    factor = metadata.number("llama.rope.scaling.factor", None) or metadata.number(
        "llama.rope.scale_linear", 1.0
    )
    original = metadata.integer("llama.rope.scaling.original_context_length", None)
    known = {
        f"llama.rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "finetuned")
    }
    unknown = sorted(
        name for name in file.metadata if name.startswith("llama.rope.scaling.") and name not in known
    )
    if kind not in ("none", "linear", "yarn") or unknown:
        raise UnsupportedError(f"{file.path}: rope scaling {kind!r} with {unknown} is not supported")
    if ROPE_DIVISORS in file.tensors:
        context = metadata.integer("llama.context_length")
        return {"rope_theta": theta, **_llama3_parameters(file, theta, context)}
    if kind == "yarn":
        return {
            "rope_theta": theta,
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    if factor != 1.0:
        return {"rope_theta": theta, "rope_type": "linear", "factor": factor}
    return {"rope_theta": theta, "rope_type": "default"}


def _llama3_parameters(file: GGUFFile, theta: float, context: int) -> dict[str, Any]:
    """The llama3 scaling that gives the divisors in the file, which does not say its parameters."""
    held = torch.cat(list(_chunks(file.tensors[ROPE_DIVISORS], None))).flatten()
    factor = _shortest(float(held.max()))
    if factor == 1.0 and bool((held == 1.0).all()):
        return {"rope_type": "default"}
    for original in (1 << power for power in range(4, math.ceil(math.log2(max(context, 16))) + 1)):
        parameters: dict[str, Any] = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
        expected = llama3_divisors(RopeConfig(theta=theta, **parameters), 2 * len(held))
        if torch.allclose(expected, held, rtol=1e-3):
            return parameters
    raise UnsupportedError(
        f"{file.path}: {ROPE_DIVISORS} fits no llama3 rope scaling with frequency factors 1 and 4"
    )


def _write_weights(file: GGUFFile, target: Path, dtype: torch.dtype, progress: Progress | None) -> None:
    """A safetensors file, written as it is dequantized, so that no more than a chunk is ever in memory."""
    names = {name: checkpoint_name(name, file.path) for name in file.tensors if name != ROPE_DIVISORS}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, target_name in names.items():
        shape = file.tensors[name].shape
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[target_name] = {
            "dtype": SAFETENSORS_DTYPES[dtype],
            "shape": shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(target, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for done, name in enumerate(names, start=1):
            for chunk in _chunks(file.tensors[name], _row_order(file, name)):
                out.write(chunk.to(dtype).view(torch.uint8).numpy().data)
            if progress is not None:
                progress("convert", done / len(names), name)


def checkpoint_name(name: str, path: Path) -> str:
    """A GGUF tensor's name in a Hugging Face checkpoint."""
    module, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    if layer is not None and layer[2] in LAYER_MODULES:
        return f"model.layers.{layer[1]}.{LAYER_MODULES[layer[2]]}.{kind}"
    if module not in MODULES:
        raise UnsupportedError(f"{path} holds the tensor {name}, which a LLaMA does not have")
    return f"{MODULES[module]}.{kind}"


def _row_order(file: GGUFFile, name: str) -> Any:
    """Where a checkpoint's rows lie in the file: GGUF interleaves the halves of each query and key head."""
    counts = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    count = counts.get(name.split(".")[-2])
    if count is None:
        return None
    heads = file.metadata.get(count, file.metadata["llama.attention.head_count"])
    return np.arange(file.tensors[name].shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _chunks(tensor: GGUFTensor, row_order: Any) -> Iterator[Tensor]:
    """The float32 rows of a tensor, a bounded number at a time."""
    import gguf

    kind = gguf.GGMLQuantizationType(tensor.quantization)
    rows = tensor.rows
    if row_order is not None:
        rows = rows.reshape(tensor.shape[0], -1)[row_order].reshape(rows.shape)
    step = max(1, CHUNK_ELEMENTS // tensor.shape[-1])
    for start in range(0, len(rows), step):
        values = gguf.dequantize(np.array(rows[start : start + step]), kind)
        yield torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def _write_tokenizer(file: GGUFFile, folder: Path, store: Store) -> None:
    """The tokenizer as transformers reads it from the file; nothing where the file has none."""
    if "tokenizer.ggml.tokens" not in file.metadata:
        return
    from transformers import PreTrainedTokenizerFast

    with store.temporary_folder() as alone:  # files beside the original must not be taken for its own
        (alone / "model.gguf").symlink_to(file.path.resolve())
        # AutoTokenizer makes the same one, five times slower: it reads a model config from the file first
        tokenizer = PreTrainedTokenizerFast.from_pretrained(alone, gguf_file="model.gguf")
        tokenizer.save_pretrained(folder)
