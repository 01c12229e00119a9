"""Which files hold a checkpoint's tensors, by the index where there is one, and of what shape each is."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from ...common.errors import LoadError
from ...common.logging import get_logger
from ..fields import read_json, whole_file

logger = get_logger("models.weights")

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class Header(NamedTuple):
    """What a file says of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors calls it, such as F8_E4M3


Headers = Mapping[str, Header]


def tensor_headers(folder: Path) -> dict[Path, Headers]:
    """The checkpoint's files with the headers of the tensors that count: where there is an index, it decides.

    Raises LoadError for what is missing, is no whole file, or does not hold what the index says.
    """
    index = folder / INDEX_NAME
    if os.path.lexists(index):
        return _indexed(index)
    if not os.path.lexists(folder / SINGLE_NAME):
        raise LoadError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}; {other_weights(folder)}")
    return {folder / SINGLE_NAME: _headers(folder / SINGLE_NAME)}


def other_weights(folder: Path) -> str:
    """What to do about a folder without safetensors, going by what else it holds."""
    found = sorted(path.name for pattern in ("*.bin", "*.pth", "*.gguf") for path in folder.glob(pattern))
    if any(name.endswith(".gguf") for name in found):
        return f"pass the GGUF file itself ({found[-1]})"
    return f"convert {found[0]} to safetensors" if found else "download the model again"


def listed(names: Sequence[str]) -> str:
    """The first twenty names, and how many more there are."""
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, open; LoadError where it is none, or damaged."""
    try:
        with safe_open(whole_file(path), framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path} is damaged or cut short: {error}; download it again") from error


def _indexed(index: Path) -> dict[Path, Headers]:
    placed = _weight_map(index)
    folder = index.parent
    missing = sorted({shard for shard in placed.values() if not os.path.lexists(folder / shard)})
    if missing:
        raise LoadError(
            f"incomplete download: {', '.join(missing)} named by {index} not found; download the model again"
        )
    held = {shard: _headers(folder / shard) for shard in sorted(set(placed.values()))}
    misplaced = sorted(f"{name} in {shard}" for name, shard in placed.items() if name not in held[shard])
    if misplaced:
        raise LoadError(f"{index} and its files differ: not found {listed(misplaced)}; download them again")
    stale = [f"{name} in {shard}" for shard in held for name in held[shard] if placed.get(name) != shard]
    if stale:
        logger.warning("%s decides; passed over are %s, which it places elsewhere", index, listed(stale))
    return {
        folder / shard: {name: header for name, header in headers.items() if placed.get(name) == shard}
        for shard, headers in held.items()
    }


def _weight_map(index: Path) -> dict[str, str]:
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not all(
        isinstance(shard, str) and Path(shard).name == shard for shard in placed.values()
    ):
        raise LoadError(
            f"{index} has no weight_map from tensor names to file names beside it; download it again"
        )
    return placed


def _headers(path: Path) -> dict[str, Header]:
    with opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.offset_keys()}
        return {name: Header(tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}
