"""What lies in a store: its names and what they need, what is damaged, and what goes when it is too large."""

import contextlib
import hashlib
import json
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .store import Store

DIGEST = re.compile(rb'"([0-9a-f]{64})"')
GRACE = 3600  # seconds in which what nobody needs yet may still be named


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A name in the store, or a folder: its own bytes, when it was used last, and what it needs."""

    kind: str
    key: str
    path: Path
    num_bytes: int
    used: float  # seconds since the epoch
    value: Any = None  # of a name: its JSON
    needs: frozenset[str] = frozenset()  # digests of objects and keys of other names


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A file that is not what it should be."""

    path: Path
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What a collection removed and what is left, in bytes, and the entries that went."""

    removed_bytes: int
    left_bytes: int
    removed: tuple[str, ...]


def entries(store: Store) -> list[Entry]:
    """Every readable name and every folder, the one used last first."""
    found = [entry for path in _refs(store) if (entry := _read(path)) is not None]
    found += [_folder_entry(path) for path in _folders(store)]
    return sorted(found, key=lambda entry: entry.used, reverse=True)


def find(store: Store, start: str) -> list[Entry]:
    """The entries whose key begins with these characters."""
    return [entry for entry in entries(store) if entry.key.startswith(start)]


def closure(store: Store, roots: Iterable[Entry], known: Iterable[Entry] = ()) -> set[Path]:
    """Every file that the roots need, their own included."""
    names = _by_key(known or entries(store))
    waiting, files = [(entry.path, entry.needs) for entry in roots], set[Path]()
    while waiting:
        path, needs = waiting.pop()
        if path in files or not path.exists():
            continue
        files.add(path)
        for key in needs:
            target = object_path(store, key)
            waiting += [(entry.path, entry.needs) for entry in names.get(key, [])]
            waiting += [(target, _needs_of(target))] if target not in files else []
    return files


def verify(store: Store) -> list[Problem]:
    """Every object hashed again, every name read, everything that is needed looked for."""
    problems = [
        Problem(path=path, what="its content is not what its name says")
        for path in objects(store)
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest_of(path)
    ]
    keys = {path.stem for path in _refs(store)}
    for path in _refs(store):
        entry = _read(path)
        if entry is None:
            problems.append(Problem(path=path, what="it is no JSON"))
            continue
        lost = [key for key in entry.needs if key not in keys and not object_path(store, key).exists()]
        problems += [Problem(path=path, what=f"it needs {key[:16]}, which is not there") for key in lost]
    return problems


def collect(store: Store, max_bytes: int, *, now: float | None = None) -> Collected:
    """Remove what nobody needs, then what was used longest ago, until at most max_bytes are left.

    Safe while others read and write: they make again what they miss.
    """
    now = time.time() if now is None else now
    before, known = total_bytes(store), entries(store)
    needed = {key for entry in known for key in _reached(store, entry)}
    files, size = set[Path](), 0
    for entry in (entry for entry in known if entry.key not in needed):
        more = {entry.path} if entry.path.is_dir() else closure(store, [entry], known) - files
        size += sum(_bytes(path) for path in more)
        if size > max_bytes:
            break
        files |= more
    gone = [entry for entry in known if entry.path not in files]
    for entry in gone:
        _remove(entry.path)
    for path in objects(store):
        if path not in files and now - path.stat().st_mtime > GRACE:
            _remove(path)
    _sweep(store, now)
    left = total_bytes(store)
    names = tuple(f"{entry.kind}/{entry.key}" for entry in gone)
    return Collected(removed_bytes=before - left, left_bytes=left, removed=names)


def total_bytes(store: Store) -> int:
    """Bytes of every file of the store."""
    return _bytes(store.root)


def objects(store: Store) -> Iterator[Path]:
    """Where every object lies."""
    yield from (path for path in sorted((store.root / "objects").glob("??/*")) if path.is_file())


def object_path(store: Store, digest: str) -> Path:
    """Where an object lies, if it is there."""
    return store.root / "objects" / digest[:2] / digest[2:]


def digest_of(path: Path) -> str:
    """The digest under which an object lies."""
    return path.parent.name + path.name


def _refs(store: Store) -> list[Path]:
    return sorted((store.root / "refs").glob("*/*.json"))


def _folders(store: Store) -> list[Path]:
    deep = [path for path in (store.root / "folders").glob("*/*") if path.is_dir()]
    return sorted([*deep, *(path for path in (store.root / "outside").glob("*") if path.is_dir())])


def _read(path: Path) -> Entry | None:
    try:
        data, facts = path.read_bytes(), path.stat()
        value = json.loads(data)
    except (OSError, ValueError):
        return None
    return Entry(
        kind=path.parent.name,
        key=path.stem,
        path=path,
        num_bytes=facts.st_size,
        used=facts.st_mtime,
        value=value,
        needs=_digests(data),
    )


def _folder_entry(path: Path) -> Entry:
    return Entry(
        kind=path.parent.name, key=path.name, path=path, num_bytes=_bytes(path), used=path.stat().st_mtime
    )


def _digests(data: bytes) -> frozenset[str]:
    return frozenset(found.decode() for found in DIGEST.findall(data))


def _needs_of(path: Path) -> frozenset[str]:
    """What an object needs, if it is a record: an object of JSON."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        first = file.read(1)
        return _digests(first + file.read()) if first == b"{" else frozenset()
    return frozenset()


def _reached(store: Store, entry: Entry) -> set[str]:
    """Keys that an entry needs, by itself or through a record."""
    return set(entry.needs).union(*(_needs_of(object_path(store, key)) for key in entry.needs))


def _by_key(known: Iterable[Entry]) -> Mapping[str, list[Entry]]:
    names: dict[str, list[Entry]] = {}
    for entry in known:
        names.setdefault(entry.key, []).append(entry)
    return names


def _bytes(path: Path) -> int:
    """Of a file, or of every file below a folder."""
    total = 0
    for found in (path, *path.rglob("*")):
        with contextlib.suppress(OSError):
            total += found.lstat().st_size if found.is_file() else 0
    return total


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _sweep(store: Store, now: float) -> None:
    """What was put aside, and what writers that were killed left behind."""
    _remove(store.root / "quarantine")
    for path in (store.root / "temporary").glob("*"):
        with contextlib.suppress(OSError):
            if now - path.stat().st_mtime > GRACE:
                _remove(path)
