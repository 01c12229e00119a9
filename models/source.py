"""Finds the checkpoint folder behind what a user calls a model: a folder, a GGUF file or a hub id."""

import re
from pathlib import Path

import torch

from ..common import env
from ..common.errors import LoadError
from ..common.progress import Progress
from ..common.store import Store
from .gguf import convert_gguf
from .weights import INDEX_NAME, SINGLE_NAME, other_weights

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt")


def resolve_source(
    name: str | Path,
    *,
    store: Store,
    revision: str | None = None,
    token: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    progress: Progress | None = None,
) -> Path:
    """The folder with the model's config and weights; `dtype` is what a GGUF file is converted to."""
    path = Path(name).expanduser()
    if str(name) and path.is_dir():  # an empty name would be the current folder
        return _checked(path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise LoadError(
                f"{path} is a file; wanted a model folder, a .gguf file or a hub id such as owner/name"
            )
        return convert_gguf(path, store, dtype=dtype, progress=progress)
    if not HUB_ID.fullmatch(str(name)) or path.suffix.lower() == ".gguf":
        raise LoadError(
            f"{str(name)!r} does not exist; wanted a model folder, a .gguf file or a hub id "
            "such as owner/name"
        )
    if progress is not None:
        progress("download", 0.0, str(name))
    return _checked(_download(str(name), revision, token or env.hub_token()))


def _checked(folder: Path) -> Path:
    """The folder, if it has what a model needs."""
    if not (folder / "config.json").exists():
        raise LoadError(f"{folder} is no model folder: it has no config.json; {other_weights(folder)}")
    if not any((folder / name).exists() for name in (SINGLE_NAME, INDEX_NAME)):
        raise LoadError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}; {other_weights(folder)}")
    return folder


def _download(name: str, revision: str | None, token: str | None) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, token=token, allow_patterns=list(HUB_FILES)))
    except errors.GatedRepoError as error:
        raise LoadError(
            f"{name} is gated: ask for access on its page, then give token= or set HF_TOKEN"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        wanted = name if revision is None else f"{name} at revision {revision}"
        raise LoadError(
            f"neither a folder nor the hub has {wanted}; a private one needs token= or HF_TOKEN"
        ) from error
    except (
        errors.HfHubHTTPError,
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        OSError,
    ) as error:
        raise LoadError(
            f"{name} is not a local folder, is not in the download cache, and the hub cannot be reached "
            f"({type(error).__name__}); go online, or give a folder or a .gguf file"
        ) from error
