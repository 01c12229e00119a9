"""What goes when a store is too large: scratch first, then converted weights, compiled code last."""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import scratch
from .contents import Entry, closure, entries, num_bytes, objects, reached, total_bytes
from .errors import StoreError
from .locks import NO_LOCKS, flock
from .sealed import MANIFEST
from .store import IN_USE, Store

GRACE = 3600  # seconds in which what nobody needs yet may still be named
SCRATCH = Path("outside", "inductor")  # what a compiler leaves behind
COMPILING = "compile"  # the lock of whoever compiles, and so needs the scratch
COLLECTING = "collecting"


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What a collection removed and what is left, in bytes; the entries that went; why more had to stay."""

    removed_bytes: int
    left_bytes: int
    removed: tuple[str, ...]
    reasons: tuple[str, ...]


def collect(store: Store, max_bytes: int, *, now: float | None = None) -> Collected:
    """Remove what nobody needs, then, until at most max_bytes are left, what a compiler left behind,
    converted weights, and compiled code, of each what was used longest ago first.

    Others may start, serve and compile meanwhile: what they have open stays, and what they miss they make
    again. Raises StoreError for a store that cannot be written.
    """
    if not store.is_writable:
        raise StoreError(f"cache folder {store.root} is read-only: nothing can be removed from it")
    with store.lock(COLLECTING):
        return _collect(store, max_bytes, time.time() if now is None else now)


def _collect(store: Store, max_bytes: int, now: float) -> Collected:
    before, removed, reasons = total_bytes(store), list[str](), list[str]()
    scratch.remove(store.root / "quarantine")
    scratch.sweep(store.root / "temporary")
    _remove_unnamed(store, now)
    if total_bytes(store) > max_bytes:
        reasons += _remove_scratch(store)
    for entry in reversed([entry for entry in entries(store) if _is_converted(store, entry)]):
        if total_bytes(store) <= max_bytes:
            break
        if _remove_folder(store, entry.path):
            removed.append(_name(entry))
        else:
            reasons.append(f"{_name(entry)} ({_size(entry.path)}) is in use by a process")
    if total_bytes(store) > max_bytes:
        removed += _remove_compiled(store, max_bytes)
    left = total_bytes(store)
    return Collected(
        removed_bytes=max(0, before - left),
        left_bytes=left,
        removed=tuple(removed),
        reasons=(*reasons, *_what_stays(store, now)) if left > max_bytes else (),
    )


def _remove_unnamed(store: Store, now: float) -> None:
    """Objects that no name needs, once they are old enough not to be on their way to one."""
    with store.lock(IN_USE):
        known = entries(store)
        needed = closure(store, known, known)
        for path in objects(store):
            if path not in needed and _age(path, now) > GRACE:
                scratch.remove(path)


def _remove_scratch(store: Store) -> list[str]:
    """Why the scratch stays, if it does."""
    path = store.root / SCRATCH
    with store.lock(COMPILING, wait=False) as is_free:
        if is_free and path.is_dir():
            _remove_whole(store, path)
    return [] if is_free else [f"{SCRATCH} ({_size(path)}) is in use by a process that compiles"]


def _remove_folder(store: Store, path: Path) -> bool:
    """Whether converted weights are gone: they stay as long as another store has them open."""
    store.let_go(path)
    try:
        descriptor = os.open(path / MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # of no use to anybody
        _remove_whole(store, path)
        return True
    try:
        is_free = flock(descriptor, shared=False, wait=False)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        is_free = False  # it is unknown whether it is open
    else:
        if is_free:
            _remove_whole(store, path)
    finally:
        os.close(descriptor)
    return is_free


def _remove_whole(store: Store, path: Path) -> None:
    """A folder, which is gone at once for everybody else."""
    with store.temporary_folder() as temporary, contextlib.suppress(FileNotFoundError):
        os.rename(path, temporary / "removed")


def _remove_compiled(store: Store, max_bytes: int) -> list[str]:
    """The entries that went, so that of the rest those used last fit."""
    with store.lock(IN_USE):
        known = [entry for entry in entries(store) if entry.path != store.root / SCRATCH]
        known = [entry for entry in known if not _is_converted(store, entry)]
        every = _files_of(store, known, known)
        size = total_bytes(store) - sum(map(num_bytes, every))
        needed = {key for entry in known for key in reached(store, entry)}
        kept = set[Path]()
        for entry in (entry for entry in known if entry.key not in needed):
            more = _files_of(store, [entry], known) - kept
            size += sum(map(num_bytes, more))
            if size > max_bytes:
                break
            kept |= more
        gone = every - kept
        for path in sorted(gone, key=lambda path: (path.is_relative_to(store.root / "objects"), path)):
            scratch.remove(path)  # names before what they name, should this be the last that we do
    return [_name(entry) for entry in known if entry.path not in kept]


def _files_of(store: Store, roots: list[Entry], known: list[Entry]) -> set[Path]:
    """What some entries need: files, and folders whole."""
    folders = {entry.path for entry in roots if entry.path.is_dir()}
    return folders | closure(store, [entry for entry in roots if entry.path not in folders], known)


def _what_stays(store: Store, now: float) -> Iterator[str]:
    """What no collection removes."""
    temporary = store.root / "temporary"
    if num_bytes(temporary):
        yield f"temporary ({_size(temporary)}) is work in progress"
    known = entries(store)
    named = closure(store, known, known)
    young = [path for path in objects(store) if path not in named and _age(path, now) <= GRACE]
    if young:
        yield f"{len(young)} objects that no entry names are an hour old at most: one may follow"


def _is_converted(store: Store, entry: Entry) -> bool:
    return entry.path.is_relative_to(store.root / "folders")


def _name(entry: Entry) -> str:
    return f"{entry.kind}/{entry.key}"


def _size(path: Path) -> str:
    return f"{num_bytes(path) / 2**20:.1f} MiB"


def _age(path: Path, now: float) -> float:
    with contextlib.suppress(OSError):
        return now - path.stat().st_mtime
    return 0.0
