"""What a careful person would ask about a store: who can write, what came from elsewhere, what is foreign."""

import contextlib
import stat
from collections.abc import Iterator
from pathlib import Path

from .bundle import BUNDLES
from .contents import entries, objects
from .store import OURS, Store
from .trust import OTHERS_WRITE

CHECKOUT = {".gitkeep", ".gitignore", "models"}  # what a checkout keeps beside
PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # how a pickle begins


def audit(store: Store) -> list[str]:
    """One line a question, an empty list where there is none."""
    return [*_rights(store.root), *_foreign(store.root), *_pickled(store), *_imported(store), *_aside(store)]


def _rights(root: Path) -> Iterator[str]:
    for path in (root, *root.rglob("*")):
        try:
            facts = path.lstat()
            link = path.readlink() if stat.S_ISLNK(facts.st_mode) else None
        except FileNotFoundError:  # collected meanwhile
            continue
        if link is not None:
            yield f"{path} is a link, to {link}"
        elif facts.st_mode & OTHERS_WRITE:
            yield f"{path} can be written by others"
        if facts.st_uid != root.stat().st_uid:
            yield f"{path} belongs to user {facts.st_uid}, the cache to {root.stat().st_uid}"


def _foreign(root: Path) -> Iterator[str]:
    yield from (
        f"{path} is no file of Lamina's" for path in root.iterdir() if path.name not in {*OURS, *CHECKOUT}
    )
    for path in (root / "objects").rglob("*"):
        named = path.parent.parent.name == "objects" and len(path.parent.name + path.name) == 64
        if path.is_file() and not named:
            yield f"{path} is no object"


def _pickled(store: Store) -> Iterator[str]:
    for path in objects(store):
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            if file.read(2) in PICKLES:
                yield f"{path} begins like a pickle, which Lamina never stores"


def _imported(store: Store) -> Iterator[str]:
    for entry in (entry for entry in entries(store) if entry.kind == BUNDLES):
        signer, files = entry.value.get("signer"), entry.value.get("files", [])
        left = [name for name in files if (store.root / name).exists()]
        if signer is None and left:
            yield f"{len(left)} files came from the bundle {entry.key[:16]}, which nobody signed"


def _aside(store: Store) -> Iterator[str]:
    for path in (store.root / "quarantine").glob("*"):
        yield f"{path} was damaged when it was read"
