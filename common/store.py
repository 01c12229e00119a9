"""Content-addressed files: objects by sha256, small JSON refs that name them, folders, locks."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import env
from .errors import StoreError
from .logging import get_logger

logger = get_logger("store")

# Layout: objects/<2 hex>/<62 hex> · refs/<kind>/<key>.json · folders/<kind>/<key>/
#         outside/<name>/ · quarantine/ · locks/ · temporary/
NOTE_USE_EVERY = 600  # seconds
DIGEST, NAME = re.compile(r"[0-9a-f]{64}"), re.compile(r"\w[\w.+-]*")


class Store:
    """Files that can be trusted: written whole or not at all, and checked on every read.

    Readers need no lock: an object's name is the hash of its content, and a name appears only by rename.
    Code is loaded from here, so the folder must be the user's own or root's. Where it cannot be written,
    what is made goes to a folder that ends with the process. Raises StoreError for a folder that cannot be
    made or trusted.
    """

    def __init__(self, root: Path | str | None = None) -> None:
        self.root = env.absolute("cache_dir", root) if root is not None else env.cache_root()
        self._told: set[str] = set()
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            _check_trust(self.root)
        except OSError as error:
            raise StoreError(
                f"cache folder {self.root} cannot be made: {error}; set LAMINA_CACHE_DIR"
            ) from error
        self.is_writable = os.access(self.root, os.W_OK | os.X_OK)
        self.home = self.root if self.is_writable else self._replacement()

    def _replacement(self) -> Path:
        """A folder for what a read-only store cannot take, removed with the store."""
        logger.warning("cache folder %s is read-only: what is made now ends with this process", self.root)
        folder = Path(tempfile.mkdtemp(prefix="lamina-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    def put(self, data: bytes) -> str:
        """The sha256 under which these bytes now lie in the store."""
        digest = hashlib.sha256(data).hexdigest()
        self._told.discard(digest)
        path = self._object_path(digest)
        if self._is_intact(path, digest):
            _note_use(path)
        else:
            self._write(self.home / _object_name(digest), data)
        return digest

    def get(self, digest: str) -> bytes:
        """The bytes of an object; StoreError where it is missing or damaged (then it is quarantined)."""
        path = self._object_path(digest)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise self._lost(digest, f"missing ({error})") from error
        if hashlib.sha256(data).hexdigest() != digest:
            self._quarantine(path)
            raise self._lost(digest, "damaged, and now in quarantine/")
        return data

    def _lost(self, digest: str, how: str) -> StoreError:
        """The error for an object; told once until it is put again, however often it is asked for."""
        message = f"object {digest[:16]} of the cache {self.root} is {how}"
        if digest not in self._told:
            self._told.add(digest)
            logger.warning("%s; what needs it will be made again", message)
        return StoreError(message)

    def path(self, digest: str) -> Path:
        """Where an object lies, checked now; for what must be opened by path, such as shared libraries."""
        self.get(digest)
        return self._object_path(digest)

    def write_ref(self, kind: str, key: str, value: Any) -> None:
        """Name a JSON value; the last writer of a name wins."""
        self._write(self.home / _ref_name(kind, key), json.dumps(value, indent=1, sort_keys=True).encode())

    def read_ref(self, kind: str, key: str) -> Any | None:
        """The value of a name, or None where there is none or it cannot be read (then it is quarantined)."""
        path = self._found(_ref_name(kind, key))
        try:
            value = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, OSError):
            self._quarantine(path)
            logger.warning("cache file %s was damaged; what it names will be made again", path)
            return None
        _note_use(path)
        return value

    def refs(self, kind: str) -> dict[str, Any]:
        """Every readable name of a kind with its value."""
        folders = {root / "refs" / kind for root in (self.home, self.root)}
        found = {path.stem for folder in folders for path in folder.glob("*.json")}
        names = sorted(name for name in found if NAME.fullmatch(name))
        values = {name: self.read_ref(kind, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def folder(self, kind: str, key: str) -> Path | None:
        """A folder written earlier by new_folder, or None."""
        path = self._found(Path("folders", kind, key))
        if not path.is_dir():
            return None
        _note_use(path)
        return path

    @contextlib.contextmanager
    def new_folder(self, kind: str, key: str) -> Iterator[Path]:
        """A temporary folder to fill, which takes its name only if the block ends without an error."""
        target = self.home / "folders" / kind / key
        with self.temporary_folder() as temporary:
            content = temporary / "content"
            content.mkdir()
            yield content
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                os.replace(content, target)

    def outside_folder(self, name: str) -> Path:
        """A folder for what other software names, locks and checks by rules of its own."""
        path = self.home / "outside" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    @contextlib.contextmanager
    def temporary_folder(self) -> Iterator[Path]:
        """A private folder on the store's file system, removed at the end of the block."""
        try:
            parent = self.home / "temporary"
            parent.mkdir(parents=True, exist_ok=True)
            path = Path(tempfile.mkdtemp(dir=parent))
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Mutual exclusion among processes, so that many starting at once build a thing only once."""
        folder = self.home / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / name, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _found(self, name: Path) -> Path:
        """Where a file lies: among what this process made, else in the store."""
        made = self.home / name
        return made if made.exists() else self.root / name

    def _object_path(self, digest: str) -> Path:
        return self._found(_object_name(digest))

    def _is_intact(self, path: Path, digest: str) -> bool:
        return path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == digest

    def _write(self, target: Path, data: bytes) -> None:
        with self.temporary_folder() as folder:
            temporary = folder / "object"
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                with open(temporary, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, target)
            except OSError as error:
                raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> StoreError:
        return StoreError(f"cache folder {self.home} cannot be written: {error}; make room or set cache_dir")

    def _quarantine(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            folder = self.home / "quarantine"
            folder.mkdir(parents=True, exist_ok=True)
            os.replace(path, folder / f"{path.parent.name}-{path.name}")


def _object_name(digest: str) -> Path:
    if not DIGEST.fullmatch(digest):  # it may come from a record, and must not lead out of the store
        raise StoreError(f"{digest!r} is no sha256 in hex")
    return Path("objects", digest[:2], digest[2:])


def _ref_name(kind: str, key: str) -> Path:
    if not NAME.fullmatch(key):
        raise StoreError(f"{key!r} is no name of the cache")
    return Path("refs", kind, f"{key}.json")


def _check_trust(root: Path) -> None:
    """Refuse a folder into which somebody else could put code."""
    facts = root.stat()
    if facts.st_uid not in (os.geteuid(), 0):
        raise StoreError(
            f"cache folder {root} belongs to user {facts.st_uid}, and code is loaded from it; chown it to "
            f"user {os.geteuid()}, or set LAMINA_CACHE_DIR to a folder of your own"
        )
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        logger.warning("cache folder %s was writable by others; now it is yours alone", root)
        root.chmod(0o700)


def _note_use(path: Path) -> None:
    """Let the time of change say when a file was used last."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > NOTE_USE_EVERY:
            os.utime(path)
