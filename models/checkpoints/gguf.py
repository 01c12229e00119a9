"""Turns a GGUF file into a checkpoint folder, once, in the store."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from ...common.errors import LaminaError, StoreError
from ...common.progress import Progress
from ...common.store import Store
from ..config import ModelConfig
from ..registry import find_model
from .gguf_config import ROPE_TENSORS, checkpoint_config, family_of, row_order
from .gguf_file import GGUFContent, GGUFFile, GGUFTensor, chunks, read_header, row_chunks
from .gguf_tokenizer import TOKENIZER_ERROR, write_tokenizer
from .quantized import gguf_blocks
from .quantized.modules import WEIGHT
from .safetensors_header import header
from .shards import SINGLE_NAME
from .weights import check_tensors

CONVERTER_VERSION = 6
FOLDER_KIND = "checkpoints"
CONFIG_KIND = "configs"
EMBEDDING = "token_embd.weight"
MEMO = "gguf"  # the kind of the store's names for hashes of files


def convert_gguf(
    path: Path,
    store: Store,
    *,
    dtype: torch.dtype,
    progress: Progress | None = None,
    needs_tokenizer: bool = True,
    kept_as: str | None = None,
) -> Path:
    """The folder with this file's config, weights (in `dtype`) and tokenizer; made at the first call.

    kept_as: how projections in blocks stay as they lie where the file has all of their rows so, a key of
    gguf_blocks.KEPT; None: they are dequantized.
    Where a tokenizer cannot be read that is not needed, a note of why lies in its place. Raises LoadError
    where the file changes meanwhile, and StoreError where the folder cannot be written.
    """
    content = GGUFContent(path)
    identity = _identity(content)
    known = store.read_ref(MEMO, identity)
    folder = store.folder(FOLDER_KIND, _key(known, dtype, kept_as)) if isinstance(known, str) else None
    if folder is not None:
        return folder
    file = read_header(content)
    _config_of(file, dtype)  # what is refused is refused before minutes are spent on the whole of it
    digest = content.digest()
    key = _key(digest, dtype, kept_as)

    def write(new: Path) -> None:
        kept = _kept_blocks(file, dtype, kept_as)
        _write_configs(file, new, dtype, kept, kept_as)
        _write_tokenizer(file, new, needs_tokenizer)
        _write_weights(file, new / SINGLE_NAME, dtype, kept, progress)
        content.require(digest)

    folder = _found_or_made(store, FOLDER_KIND, key, write)
    store.remember(MEMO, identity, digest)
    return folder


def config_of_gguf(path: Path, store: Store, *, dtype: torch.dtype, kept_as: str | None = None) -> Path:
    """A folder with what this file's metadata say of the model, and no weights: a few kilobytes, at once."""
    content = GGUFContent(path)
    key = _key(_identity(content), dtype, kept_as)

    def write(new: Path) -> None:
        file = read_header(content)
        _write_configs(file, new, dtype, _kept_blocks(file, dtype, kept_as), kept_as)

    return _found_or_made(store, CONFIG_KIND, key, write)


def _found_or_made(store: Store, kind: str, key: str, write: Callable[[Path], None]) -> Path:
    """The folder of this key; of many processes that lack it at once one writes it."""
    folder = store.folder(kind, key)
    if folder is not None:
        return folder
    with store.lock(f"{kind}-{key}"):
        folder = store.folder(kind, key)
        if folder is None:
            with store.new_folder(kind, key) as new:
                write(new)
            folder = store.folder(kind, key)
    if folder is None:
        raise StoreError(
            f"what was converted is damaged as soon as it is written to {store.home}; see its disk"
        )
    return folder


def _key(digest: str, dtype: torch.dtype, kept_as: str | None) -> str:
    kept = "" if kept_as is None else f"-{kept_as}"
    return f"{digest}-v{CONVERTER_VERSION}-{str(dtype).removeprefix('torch.')}{kept}"


def _identity(content: GGUFContent) -> str:
    """What stays the same for as long as a file is not touched."""
    facts = content.facts
    identity = (
        f"{content.path.resolve()} {facts.st_ino} {facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns}"
    )
    return str(xxhash.xxh3_128_hexdigest(os.fsencode(identity)))


def _write_configs(
    file: GGUFFile, folder: Path, dtype: torch.dtype, kept: Mapping[str, str], kept_as: str | None
) -> None:
    config = _config_of(file, dtype)
    if kept:
        modules = {name.removesuffix(WEIGHT): kind for name, kind in kept.items()}
        config["quantization_config"] = {
            "quant_method": gguf_blocks.METHOD,
            "kept_as": kept_as,
            "modules": modules,
        }
    config = {name: value for name, value in config.items() if value is not None}
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id") if name in config}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _config_of(file: GGUFFile, dtype: torch.dtype) -> dict[str, Any]:
    """What config.json is to hold; LoadError or UnsupportedError for what would not load."""
    config = checkpoint_config(file, dtype)
    _check_tensors(file, ModelConfig.from_dict(config, origin=str(file.path)))
    return config


def _kept_blocks(file: GGUFFile, dtype: torch.dtype, kept_as: str | None) -> dict[str, str]:
    """The kind of each weight that can stay as it lies, by its name in a checkpoint: of whole projections.

    Blocks as they are may be of several kinds in one projection; each rank then has its rows of each. Among
    blocks as they are is a projection that is tied to the embedding, by the latter's kind.
    """
    from gguf import GGMLQuantizationType

    if kept_as is None:
        return {}
    model = ModelConfig.from_dict(checkpoint_config(file, dtype), origin=str(file.path))
    kinds = {
        target: GGMLQuantizationType(file.tensors[name].quantization).name
        for name, target in _checkpoint_names(file).items()
    }
    kept: dict[str, str] = {}
    specs = find_model(model.architecture).parameters(model)
    for spec in specs.values():
        sources = tuple(spec.source_shapes)
        lying = sources if spec.tied_to is None else tuple(specs[spec.tied_to].source_shapes)
        own = {kinds.get(source) for source in lying}
        is_served = kept_as == "blocks" or (spec.tied_to is None and len(own) == 1)
        if spec.projection and is_served and own <= set(gguf_blocks.KEPT[kept_as]):
            kept |= dict(zip(sources, map(kinds.__getitem__, lying), strict=True))
    return kept


def _write_tokenizer(file: GGUFFile, folder: Path, is_needed: bool) -> None:
    """The tokenizer's files, or a note of why there are none."""
    before = set(folder.iterdir())
    try:
        write_tokenizer(file, folder)
    except LaminaError as error:
        if is_needed:
            raise
        for path in set(folder.iterdir()) - before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (folder / TOKENIZER_ERROR).write_text(str(error), encoding="utf-8")


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


def _entry(
    tensor: GGUFTensor, name: str, dtype: torch.dtype, kept: Mapping[str, str]
) -> tuple[str, tuple[torch.dtype, tuple[int, ...]]]:
    """What a tensor is called in a checkpoint, and its dtype and shape there."""
    if name not in kept:
        return name, (dtype, tensor.shape)
    module, size = name.removesuffix(WEIGHT), (tensor.num_rows, tensor.row_bytes)
    return f"{module}.{gguf_blocks.TENSOR}", (torch.uint8, size)


def _write_weights(
    file: GGUFFile, target: Path, dtype: torch.dtype, kept: Mapping[str, str], progress: Progress | None
) -> None:
    """A safetensors file, written as it is dequantized, so that no more than a chunk is ever in memory."""
    family, names = family_of(file), list(_checkpoint_names(file).items())
    names += [(EMBEDDING, name) for name in kept.keys() - {target_name for _, target_name in names}]  # tied
    layout = dict(_entry(file.tensors[name], target, dtype, kept) for name, target in names)
    with open(target, "wb") as out:
        out.write(header(layout))
        for done, (name, target_name) in enumerate(names, start=1):
            if target_name in kept:
                for rows in row_chunks(file.tensors[name], row_order(file, family, name)):
                    out.write(rows.data)
                continue
            offset = family.norm_offset if name.endswith("norm.weight") else 0.0
            for chunk in chunks(file.tensors[name], row_order(file, family, name)):
                values = chunk - offset if offset else chunk
                out.write(values.to(dtype).view(torch.uint8).numpy().data)
            if progress is not None:
                progress("convert", done / len(names), name)
