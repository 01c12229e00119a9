"""What lies in a store: its names and what they need, what is damaged."""

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import trust
from .sealed import unseal
from .store import OURS, Store

DIGEST = re.compile(rb'"([0-9a-f]{64})"')
LOGS = ("bundles",)  # kinds of names that list keys without needing what these name


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


def entries(store: Store) -> list[Entry]:
    """Every readable name and every folder, the one used last first."""
    found = [_read(path) for path in _refs(store)] + [_folder_entry(path) for path in _folders(store)]
    there = [entry for entry in found if isinstance(entry, Entry)]
    return sorted(there, key=lambda entry: entry.used, reverse=True)


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
    """Every object and folder hashed again, every name read, everything that is needed looked for."""
    found = [*_faults_of_objects(store), *_faults_of_names(store)]
    for path in store.root.glob("folders/*/*"):
        if path.is_dir() and (why := store.fault_of(path)) is not None and path.is_dir():
            found.append(Problem(path=path, what=why))
    return found


def _faults_of_objects(store: Store) -> Iterator[Problem]:
    for path in objects(store):
        try:
            data = trust.read_file(path, is_reachable=True)
        except FileNotFoundError:  # collected meanwhile
            continue
        except OSError as error:
            yield Problem(path=path, what=str(error))
            continue
        if hashlib.sha256(data).hexdigest() != digest_of(path):
            yield Problem(path=path, what="its content is not what its name says")


def _faults_of_names(store: Store) -> Iterator[Problem]:
    keys = {path.stem for path in _refs(store)}
    for path in _refs(store):
        entry = _read(path)
        if isinstance(entry, str):
            yield Problem(path=path, what=entry)
        elif entry is not None:
            lost = [key for key in entry.needs if key not in keys and not object_path(store, key).exists()]
            yield from (
                Problem(path=path, what=f"it needs {key[:16]}, which is not there") for key in sorted(lost)
            )


def total_bytes(store: Store) -> int:
    """Bytes of every file that is the store's."""
    return sum(num_bytes(store.root / name) for name in OURS)


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


def _read(path: Path) -> Entry | str | None:
    """The entry of a name; how it is none, in words; None where it is gone."""
    kind, key = path.parent.name, path.stem
    try:
        facts = path.stat()
        value = unseal(f"{kind}/{key}", trust.read_file(path, is_reachable=True))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return f"it {error}" if isinstance(error, ValueError) else str(error)
    return Entry(
        kind=kind,
        key=key,
        path=path,
        num_bytes=facts.st_size,
        used=facts.st_mtime,
        value=value,
        needs=frozenset() if kind in LOGS else _digests(json.dumps(value).encode()),
    )


def _folder_entry(path: Path) -> Entry | None:
    try:
        used = path.stat().st_mtime
    except FileNotFoundError:
        return None
    return Entry(kind=path.parent.name, key=path.name, path=path, num_bytes=num_bytes(path), used=used)


def _digests(data: bytes) -> frozenset[str]:
    return frozenset(found.decode() for found in DIGEST.findall(data))


def _needs_of(path: Path) -> frozenset[str]:
    """What an object needs, if it is a record: an object of JSON."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        first = file.read(1)
        return _digests(first + file.read()) if first == b"{" else frozenset()
    return frozenset()


def reached(store: Store, entry: Entry) -> set[str]:
    """Keys that an entry needs, by itself or through a record."""
    return set(entry.needs).union(*(_needs_of(object_path(store, key)) for key in entry.needs))


def _by_key(known: Iterable[Entry]) -> Mapping[str, list[Entry]]:
    names: dict[str, list[Entry]] = {}
    for entry in known:
        names.setdefault(entry.key, []).append(entry)
    return names


def num_bytes(path: Path) -> int:
    """Of a file, or of every file below a folder; what goes meanwhile counts for nothing."""
    with contextlib.suppress(OSError):
        facts = path.lstat()
        if not stat.S_ISDIR(facts.st_mode):
            return facts.st_size
        return sum(num_bytes(Path(found.path)) for found in os.scandir(path))
    return 0
