"""Reads a head as it is published: what kind it is, its config, its tensors, and the ids that it drafts."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.errors import LoadError, UnsupportedError
from ..checkpoints.quantized.configs import read_dialect
from ..checkpoints.shards import Headers, opened, tensor_headers
from ..checkpoints.weights import Checkpoint, check_tensors
from ..config import ModelConfig
from ..fields import read_json
from ..quantization.model_schemes import ModelSchemes
from ..registry import find_model
from . import eagle1, eagle3
from .definition import HeadDefinition, head_config

D2T, T2D = "d2t", "t2d"  # of draft ids how far their target ids are; of target ids whether one is drafted
NESTED = "transformer_layer_config"  # where some tools keep what is LLaMA's
SHARED = ("embed_tokens.weight", "lm_head.weight")


class Head(NamedTuple):
    """A head that was found: its config with what its files say, and where its tensors lie."""

    config: ModelConfig
    definition: HeadDefinition
    checkpoint: Checkpoint | None  # None: weights are made up
    files: Mapping[Path, Headers]


def read_head(folder: Path, *, is_dummy: bool = False) -> Head:
    """The head in a folder; no weight is read.

    Raises LoadError for files that are none of a head, ConfigError for values that cannot be, and
    UnsupportedError for a head that is quantized, or of a kind that is not served.
    """
    raw = _flat(read_json(folder / "config.json"))
    files = {} if is_dummy else tensor_headers(folder)
    shapes = {name: header.shape for held in files.values() for name, header in held.items()}
    architecture = _architecture(raw, shapes)
    raw["architectures"] = [architecture]
    config = ModelConfig.from_dict(raw, origin=str(folder / "config.json"))
    definition = find_model(architecture)
    assert isinstance(definition, HeadDefinition)
    if is_dummy:
        return Head(config, definition, None, files)
    if read_dialect(folder) is not None:
        raise UnsupportedError(f"the head {folder} is quantized; wanted one in bfloat16, float16 or float32")
    config = _as_it_lies(config, shapes)
    return Head(config, definition, _checkpoint(config, definition, files, folder), files)


def has_head(folder: Path) -> bool:
    """Whether the checkpoint in a folder is one of a head, by its tensors."""
    return any(name.endswith("fc.weight") for held in tensor_headers(folder).values() for name in held)


def _flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    nested = raw.get(NESTED)
    return {**(nested if isinstance(nested, dict) else {}), **{k: v for k, v in raw.items() if k != NESTED}}


def _architecture(raw: Mapping[str, Any], names: Collection[str]) -> str:
    """Of which kind a head is: by its tensors, else by its config."""
    if names:
        if not any(name.endswith("fc.weight") for name in names):
            raise LoadError(
                "the head has no tensor fc.weight, as EAGLE-1 and EAGLE-3 have; wanted the folder of such a "
                "head, or Draft(model) for a model of its own"
            )
        return (
            eagle3.ARCHITECTURE
            if any(name.endswith("hidden_norm.weight") for name in names)
            else eagle1.ARCHITECTURE
        )
    said = f"{raw.get('architectures')} {raw.get('speculators_model_type')}".lower()
    is_third = "eagle3" in said or "draft_vocab_size" in raw or "eagle_config" in raw
    return eagle3.ARCHITECTURE if is_third else eagle1.ARCHITECTURE


def _as_it_lies(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """The config with what its files say of names, and of tensors that are there or not."""
    prefix = "model." if any(name.startswith("model.") for name in names) else ""
    is_named = any(name.startswith(f"{prefix}midlayer.") for name in names)
    own = replace(
        head_config(config),
        prefix=prefix,
        first_layer="midlayer" if is_named else "layers.0",
        fc_bias=f"{prefix}fc.bias" in names,
        has_embedding=f"{prefix}{SHARED[0]}" in names,
        has_lm_head=SHARED[1] in names,
    )
    return replace(config, own=own)


def _checkpoint(
    config: ModelConfig, definition: HeadDefinition, files: Mapping[Path, Headers], folder: Path
) -> Checkpoint:
    own = {
        path: {name: header for name, header in held.items() if name not in (D2T, T2D)}
        for path, held in files.items()
    }
    shapes = {name: header.shape for held in own.values() for name, header in held.items()}
    return Checkpoint(
        schemes=ModelSchemes(specs=definition.parameters(config)),
        files=own,
        slots=check_tensors(definition, config, shapes, folder),
        modules={},
        owners={},
        num_kv_heads=config.num_kv_heads,
    )


def target_ids(head: Head) -> Tensor | None:
    """The target's id of each id that a head drafts, int64 [draft vocab]; None where they are the same.

    Raises LoadError for a map that is damaged: of another size, out of range, not in order, or not what the
    other map says.
    """
    vocab, drafted = head.config.vocab_size, head_config(head.config).draft_vocab_size
    maps = {name: _read(head.files, name) for name in (D2T, T2D)}
    offsets = maps[D2T]
    if offsets is None:
        if drafted != vocab and head.checkpoint is not None:
            raise LoadError(
                f"the head drafts {drafted} of {vocab} ids, and has no tensor {D2T} that says which"
            )
        return None if drafted == vocab else torch.arange(drafted)
    if offsets.shape != (drafted,) or offsets.is_floating_point():
        raise LoadError(
            f"{D2T} of the head is {list(offsets.shape)} {offsets.dtype}; wanted {drafted} integers"
        )
    ids = torch.arange(drafted) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or bool((ids.diff() <= 0).any()):
        raise LoadError(f"{D2T} of the head leads to ids that are no {drafted} different ones below {vocab}")
    is_drafted = maps[T2D]
    if is_drafted is not None and not torch.equal(is_drafted.bool().nonzero()[:, 0], ids):
        raise LoadError(f"{D2T} and {T2D} of the head name different ids; download it again")
    return ids


def _read(files: Mapping[Path, Headers], name: str) -> Tensor | None:
    for path, held in files.items():
        if name in held:
            with opened(path) as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
    return None
