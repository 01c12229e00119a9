"""JSON that says what it is of and hashes itself, and lists of files with a hash each."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

MANIFEST = "manifest.json"  # of a sealed folder
BLOCK = 1 << 22  # bytes hashed at a time


def seal(name: str, value: Any) -> bytes:
    """A JSON value as a file that holds what it is of and the sha256 of both."""
    content = {"of": name, "sha256": _hash(name, value), "value": value}
    return json.dumps(content, indent=1, sort_keys=True).encode()


def unseal(name: str, data: bytes) -> Any:
    """The value of a file that seal wrote for this name; ValueError says how it is something else."""
    try:
        content = json.loads(data)
        of, stated, value = content["of"], content["sha256"], content["value"]
        found = _hash(name, value)
    except (ValueError, RecursionError) as error:
        raise ValueError("is no JSON") from error
    except (KeyError, TypeError) as error:
        raise ValueError("is no record of this version") from error
    if of != name:
        raise ValueError(f"is the record of {str(of)[:100]}")
    if stated != found:
        raise ValueError("is not what was written")
    return value


def seal_folder(name: str, folder: Path) -> Path:
    """Write the manifest of a folder's files, which only their owner may change from now on."""
    listed = {}
    for path in _files(folder):
        path.chmod(path.stat().st_mode & 0o755)
        listed[path.relative_to(folder).as_posix()] = {
            "bytes": path.stat().st_size,
            "xxh3": _hash_file(path),
        }
    manifest = folder / MANIFEST
    with open(os.open(manifest, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
        file.write(seal(name, listed))
    return manifest


def fault_of_folder(name: str, folder: Path, manifest: bytes) -> str | None:
    """How a sealed folder differs from its manifest, every byte read, or None where it does not."""
    try:
        listed = unseal(name, manifest)
    except ValueError as error:
        return f"{MANIFEST} {error}"
    found = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
    found.pop(MANIFEST, None)
    if not isinstance(listed, Mapping) or listed.keys() != found.keys():
        return "its files are others than its manifest lists"
    for file, path in found.items():
        if path.is_symlink() or not path.is_file():
            return f"{file} is no regular file"
        if path.stat().st_size != listed[file].get("bytes") or _hash_file(path) != listed[file].get("xxh3"):
            return f"{file} is not what was written"
    return None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


def _hash(name: str, value: Any) -> str:
    text = json.dumps([name, value], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _hash_file(path: Path) -> str:
    """XXH3 reads 20 GB/s, sha256 a tenth of it: weights are hashed whole at every start."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        block = memoryview(bytearray(BLOCK))
        while count := file.readinto(block):
            digest.update(block[:count])
    return str(digest.hexdigest())
