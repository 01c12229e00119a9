"""Finds the checkpoint folder behind what a user calls a model: a folder, a GGUF file or a hub id."""

import os
import re
from pathlib import Path

import torch

from ...common import env
from ...common.errors import LoadError, UnsupportedError, shown
from ...common.progress import Progress, say_nothing
from ...common.store import Store
from ..fields import Fields, read_json, whole_file
from .gguf import convert_gguf
from .hub import download
from .shards import INDEX_NAME, SINGLE_NAME, other_weights

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
ADAPTER_NAME = "adapter_config.json"


def resolve_source(
    name: str | Path,
    *,
    store: Store,
    revision: str | None = None,
    token: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    progress: Progress | None = None,
    needs_tokenizer: bool = True,
    kept_as: str | None = None,
) -> Path:
    """The folder with the model's config and weights; `dtype` is what a GGUF file is converted to, but for
    projections whose blocks it keeps, by kept_as as convert_gguf has it.

    Raises LoadError for a name of nothing, and for what holds no model.
    """
    path = Path(name).expanduser()
    if str(name) and path.is_dir():  # an empty name would be the current folder
        return _checked(path)
    if str(name) and os.path.lexists(path):
        if whole_file(path).suffix.lower() != ".gguf":
            raise LoadError(
                f"{path} is a file; wanted a model folder, a .gguf file or a hub id such as owner/name"
            )
        return convert_gguf(
            path,
            store,
            dtype=dtype,
            progress=progress,
            needs_tokenizer=needs_tokenizer,
            kept_as=kept_as,
        )
    if not HUB_ID.fullmatch(str(name)) or path.suffix.lower() == ".gguf":
        raise LoadError(
            f"{shown(str(name))} does not exist; wanted a model folder, a .gguf file or a hub id "
            "such as owner/name"
        )
    return _checked(
        download(str(name), revision, token or env.hub_token(), progress or say_nothing, check=_check_adapter)
    )


def _checked(folder: Path) -> Path:
    """The folder, if it has what a model needs."""
    _check_adapter(folder)
    if not os.path.lexists(folder / "config.json"):
        raise LoadError(f"{folder} is no model folder: it has no config.json; {other_weights(folder)}")
    if not any(os.path.lexists(folder / name) for name in (SINGLE_NAME, INDEX_NAME)):
        raise LoadError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}; {other_weights(folder)}")
    return folder


def _check_adapter(folder: Path) -> None:
    """Refuse an adapter, alone or beside a model, which would be left out of what is computed."""
    path = folder / ADAPTER_NAME
    if not os.path.lexists(path):
        return
    adapter = Fields(read_json(path), str(path))
    kind, base = adapter.text("peft_type", "unknown"), adapter.text("base_model_name_or_path", "not named")
    raise UnsupportedError(
        f"{folder} holds an adapter ({ADAPTER_NAME}: {kind}, its base model is {base}), which Lamina does "
        "not apply; merge it into its base with peft's merge_and_unload, save that, and give the new folder"
    )
