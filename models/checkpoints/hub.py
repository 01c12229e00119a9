"""Fetches a model from the hub: first what says whether it can be served, then the weights it names."""

import io
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...common.errors import LoadError
from ...common.logging import get_logger
from ...common.progress import Progress, say_nothing
from ..config import read_model_config
from ..fields import read_json
from ..pooling.checkpoint import module_files
from .shards import INDEX_NAME, SINGLE_NAME

logger = get_logger("models.hub")
SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model", "*.txt")
OF_OTHER_FORMATS = ("*/*.json", "*/*.txt", "*/tokenizer.model")


def download(
    name: str,
    revision: str | None,
    token: str | None,
    progress: Progress,
    *,
    check: Callable[[Path], None],
) -> Path:
    """The folder in the hub's cache; `check` sees it before the weights come.

    Raises LoadError for what cannot be had. Without a connection, or with HF_HUB_OFFLINE=1, the cache serves.
    """
    progress("download", 0.0, name)
    folder = _fetch(name, revision, token, SMALL_FILES, _meter(say_nothing, 0))
    check(folder)
    if not (folder / "config.json").exists():
        return folder
    read_model_config(folder)
    files, size = _weight_files(folder)
    # the same commit, should the branch have moved on; outside of a cache there is none
    commit = folder.name if folder.parent.name == "snapshots" else revision
    if modules := module_files(folder):
        _fetch(name, commit, token, modules, _meter(say_nothing, 0), ignored=())
    return _fetch(name, commit, token, files, _meter(progress, size))


def _weight_files(folder: Path) -> tuple[tuple[str, ...], int]:
    """The files that hold the model's weights, and how many bytes they are, 0 where nothing says so."""
    if not (folder / INDEX_NAME).exists():
        return (SINGLE_NAME,), 0
    index = read_json(folder / INDEX_NAME)
    placed, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(placed, dict):
        raise LoadError(f"{folder / INDEX_NAME} has no weight_map; download it again")
    size = metadata.get("total_size", 0) if isinstance(metadata, dict) else 0
    return tuple(sorted({str(shard) for shard in placed.values()})), int(size)


def _meter(progress: Progress, size: int) -> type[Any]:
    """A class of progress bars that show nothing, and report the furthest of those that count bytes."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    lock, furthest = threading.Lock(), [0.0]

    class Meter(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread that watches over bars

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            total = max(self.total or 0, size)
            if self.unit == "B" and total:
                with lock:  # files come by threads of their own
                    furthest[0] = max(furthest[0], min(self.n / total, 1.0))
                    progress("download", furthest[0], f"{self.n / 1e9:.2f} of {total / 1e9:.2f} GB")
            return shown

    return Meter


def _fetch(
    name: str,
    revision: str | None,
    token: str | None,
    files: Sequence[str],
    meter: type[Any],
    ignored: Sequence[str] = OF_OTHER_FORMATS,
) -> Path:
    from huggingface_hub import errors, snapshot_download

    options: dict[str, Any] = {
        "revision": revision,
        "token": token,
        "allow_patterns": list(files),
        "ignore_patterns": list(ignored),
        "tqdm_class": meter,
    }
    try:
        folder = Path(snapshot_download(name, **options))
        if folder.name == "snapshots":  # the branch's file is empty
            raise errors.LocalEntryNotFoundError(f"{folder} has no commit for {revision or 'main'}")
        return folder
    except errors.GatedRepoError as error:
        raise LoadError(
            f"{name} is gated: ask for access on its page, then give token= or set HF_TOKEN"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        asked = name if revision is None else f"{name} at revision {revision}"
        raise LoadError(
            f"neither a folder nor the hub has {asked}; a private one needs token= or HF_TOKEN"
        ) from error
    except (
        errors.HfHubHTTPError,
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        OSError,
    ) as error:
        commit = _kept_commit(name, revision)
        if commit is not None and commit != revision:
            return Path(snapshot_download(name, **{**options, "revision": commit}, local_files_only=True))
        raise LoadError(
            f"{name} is not a local folder, is not in the download cache, and the hub cannot be reached "
            f"({type(error).__name__}); go online, or give a folder or a .gguf file"
        ) from error


def _kept_commit(name: str, revision: str | None) -> str | None:
    """The commit that the download cache holds of a model whose branch it cannot tell; None for none at all.

    The file that names a branch's commit may be lost, or end in a line break. LoadError where it is lost and
    there are several commits to choose from.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    kept = sorted(path.name for path in (folder / "snapshots").glob("*"))
    branch = folder / "refs" / (revision or "main")
    if branch.is_file() and (commit := branch.read_text().strip()) in kept:
        return commit
    if revision is not None or not kept:
        return None
    if len(kept) > 1:
        raise LoadError(
            f"the download cache holds {name} at {', '.join(kept)}, nothing there says which is main, and "
            "the hub cannot be reached; wanted revision= with one of them"
        )
    logger.warning("%s: the download cache does not say which commit is main; its only one is used", name)
    return kept[0]
