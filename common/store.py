"""Content-addressed files: objects by sha256, small JSON refs that name them, folders, locks."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import env
from .errors import StoreError
from .logging import get_logger

logger = get_logger("store")

# Layout: objects/<2 hex>/<62 hex> · refs/<kind>/<key>.json · folders/<kind>/<key>/
#         outside/<name>/ · quarantine/ · locks/ · temporary/


class Store:
    """Files that can be trusted: written whole or not at all, and checked on every read.

    Readers need no lock: an object's name is the hash of its content, and a name appears only by rename.
    """

    def __init__(self, root: Path | str | None = None) -> None:
        self.root = Path(root).expanduser().resolve() if root is not None else env.cache_root()
        self._told: set[str] = set()
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StoreError(
                f"cache folder {self.root} cannot be made: {error}; set LAMINA_CACHE_DIR"
            ) from error

    def put(self, data: bytes) -> str:
        """The sha256 under which these bytes now lie in the store."""
        digest = hashlib.sha256(data).hexdigest()
        self._told.discard(digest)
        target = self._object_path(digest)
        if not self._is_intact(target, digest):
            self._write(target, data)
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
        self._write(self._ref_path(kind, key), json.dumps(value, indent=1, sort_keys=True).encode())

    def read_ref(self, kind: str, key: str) -> Any | None:
        """The value of a name, or None where there is none or it cannot be read (then it is quarantined)."""
        path = self._ref_path(kind, key)
        try:
            return json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, OSError):
            self._quarantine(path)
            logger.warning("cache file %s was damaged; what it names will be made again", path)
            return None

    def refs(self, kind: str) -> dict[str, Any]:
        """Every readable name of a kind with its value."""
        folder = self.root / "refs" / kind
        names = sorted(path.stem for path in folder.glob("*.json")) if folder.is_dir() else []
        values = {name: self.read_ref(kind, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def folder(self, kind: str, key: str) -> Path | None:
        """A folder written earlier by new_folder, or None."""
        path = self.root / "folders" / kind / key
        return path if path.is_dir() else None

    @contextlib.contextmanager
    def new_folder(self, kind: str, key: str) -> Iterator[Path]:
        """A temporary folder to fill, which takes its name only if the block ends without an error."""
        target = self.root / "folders" / kind / key
        with self.temporary_folder() as temporary:
            content = temporary / "content"
            content.mkdir()
            yield content
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                os.replace(content, target)

    def outside_folder(self, name: str) -> Path:
        """A folder for what other software names, locks and checks by rules of its own."""
        path = self.root / "outside" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    @contextlib.contextmanager
    def temporary_folder(self) -> Iterator[Path]:
        """A private folder on the store's file system, removed at the end of the block."""
        parent = self.root / "temporary"
        parent.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(dir=parent))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Mutual exclusion among processes, so that many starting at once build a thing only once."""
        folder = self.root / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / name, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _object_path(self, digest: str) -> Path:
        return self.root / "objects" / digest[:2] / digest[2:]

    def _ref_path(self, kind: str, key: str) -> Path:
        return self.root / "refs" / kind / f"{key}.json"

    def _is_intact(self, path: Path, digest: str) -> bool:
        return path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == digest

    def _write(self, target: Path, data: bytes) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with self.temporary_folder() as folder:
            temporary = folder / "object"
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)

    def _quarantine(self, path: Path) -> None:
        folder = self.root / "quarantine"
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            os.replace(path, folder / f"{path.parent.name}-{path.name}")
