"""Turns a GGUF file into a checkpoint folder, once, in the store."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import torch
import xxhash

from ..common.errors import LoadError
from ..common.progress import Progress
from ..common.store import Store
from .config import ModelConfig
from .gguf_config import ROPE_TENSORS, checkpoint_config, family_of, row_order
from .gguf_file import GGUFFile, chunks, read_gguf
from .gguf_tokenizer import write_tokenizer
from .registry import find_model
from .shards import SINGLE_NAME
from .weights import check_tensors

CONVERTER_VERSION = 3
FOLDER_KIND = "checkpoints"
CONFIG_KIND = "configs"
SAFETENSORS_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
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
                write_tokenizer(file, new)
            folder = store.folder(FOLDER_KIND, key)
    assert folder is not None
    return folder


def config_of_gguf(path: Path, store: Store, *, dtype: torch.dtype) -> Path:
    """A folder with what this file's metadata say of the model, and no weights: a few kilobytes, at once."""
    try:
        key = xxhash.xxh3_128_hexdigest(_identity(path).encode())
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error}") from error
    key = f"{key}-v{CONVERTER_VERSION}-{str(dtype).removeprefix('torch.')}"
    with store.lock(f"{CONFIG_KIND}-{key}"):
        folder = store.folder(CONFIG_KIND, key)
        if folder is None:
            with store.new_folder(CONFIG_KIND, key) as new:
                _write_configs(read_gguf(path), new, dtype)
            folder = store.folder(CONFIG_KIND, key)
    assert folder is not None
    return folder


def _identity(path: Path) -> str:
    """Which file it is, for as long as it is not touched."""
    stat = path.stat()
    return f"{path.resolve()} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"


def _content_hash(path: Path, store: Store) -> str:
    """The hash of a file's content, remembered for as long as the file is not touched."""
    try:
        key = xxhash.xxh3_128_hexdigest(_identity(path).encode())
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
    _check_tensors(file, ModelConfig.from_dict(config, origin=str(file.path)))
    config = {name: value for name, value in config.items() if value is not None}
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id") if name in config}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _checkpoint_names(file: GGUFFile) -> dict[str, str]:
    """The name that each weight of the file has in a checkpoint."""
    family = family_of(file)
    return {
        name: family.checkpoint_name(name, file.path) for name in file.tensors if name not in ROPE_TENSORS
    }


def _check_tensors(file: GGUFFile, config: ModelConfig) -> None:
    """Refuse what would not load, before it is written."""
    names = _checkpoint_names(file)
    shapes = {target: file.tensors[name].shape for name, target in names.items()}
    check_tensors(find_model(config.architecture), config, shapes, file.path)


def _write_weights(file: GGUFFile, target: Path, dtype: torch.dtype, progress: Progress | None) -> None:
    """A safetensors file, written as it is dequantized, so that no more than a chunk is ever in memory."""
    family, names = family_of(file), _checkpoint_names(file)
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
            offset = family.norm_offset if name.endswith("norm.weight") else 0.0
            for chunk in chunks(file.tensors[name], row_order(file, family, name)):
                values = chunk - offset if offset else chunk
                out.write(values.to(dtype).view(torch.uint8).numpy().data)
            if progress is not None:
                progress("convert", done / len(names), name)
