"""Content-addressed files: objects by sha256, small JSON refs that name them, folders, locks."""

import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
import stat
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import env, scratch, trust
from .errors import StoreError
from .locks import flock, has_locks, hold, lies_at
from .logging import get_logger, log_once
from .sealed import MANIFEST, fault_of_folder, seal, seal_folder, unseal

logger = get_logger("store")

# Layout: objects/<2 hex>/<62 hex> · refs/<kind>/<key>.json · folders/<kind>/<key>/
#         outside/<name>/ · quarantine/ · locks/ · temporary/
OURS = ("objects", "refs", "folders", "outside", "locks", "temporary", "quarantine")
NOTE_USE_EVERY = 600  # seconds
DIGEST, NAME = re.compile(r"[0-9a-f]{64}"), re.compile(r"\w[\w.+-]*")
PLAIN = re.compile(r"[A-Za-z0-9_./+-]+")  # a path that no compiler and no generated include stumbles over
LONGEST_NAME = 200  # of a file, less what is added
IN_USE = "in_use"  # the lock that readers and writers share, and that a collection has alone


class Store:
    """Files that can be trusted: written whole or not at all, and checked on every read.

    Readers need no lock: an object's name is the hash of its content, a ref says what it is of and hashes
    itself, a folder has a manifest, and a name appears only by rename. Code is loaded from here, so nothing
    is read that somebody else than the user or root could have written. Where the store cannot be written,
    what is made goes to a folder that ends with the process. Raises StoreError for a folder that cannot be
    made or trusted.
    """

    def __init__(self, root: Path | str | None = None) -> None:
        self.root = env.absolute("cache_dir", root) if root is not None else env.cache_root()
        self._reported: set[str] = set()
        self._reachable: dict[Path, bool] = {}  # folders that are safe: whether others can enter them
        self._leases: dict[Path, int] = {}  # open manifests of folders in use
        weakref.finalize(self, _close, self._leases)
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            was_open = trust.take_over(self.root)
            self.is_writable = os.access(self.root, os.W_OK | os.X_OK)
            self.home = self.root if self.is_writable else self._replacement()
            if was_open:
                self._begin_anew()
        except OSError as error:
            raise StoreError(
                f"cache folder {self.root} cannot be made: {error}; set LAMINA_CACHE_DIR"
            ) from error
        self.sweep()

    def sweep(self) -> None:
        """Remove what processes left of work in progress when they ended."""
        scratch.sweep(self.home / "temporary")

    def _replacement(self) -> Path:
        """A folder for what a read-only store cannot take, removed with the store."""
        logger.warning("cache folder %s is read-only: what is made now ends with this process", self.root)
        folder = scratch.TemporaryFolder("store")
        weakref.finalize(self, folder.remove)
        return folder.path

    def _begin_anew(self) -> None:
        """Put aside whatever others may have put here."""
        suspect = [self.root / name for name in OURS if (self.root / name).exists()]
        aside = Path(tempfile.mkdtemp(prefix="quarantine-", dir=self.root)) if suspect else self.root
        for path in suspect:
            os.replace(path, aside / path.name)
        if suspect:
            os.replace(aside, self.root / "quarantine")
        what = "what lay in it is in quarantine/ and is made again" if suspect else "it was empty"
        logger.warning("others could write into cache folder %s: %s, now it is yours alone", self.root, what)

    def put(self, data: bytes) -> str:
        """The sha256 under which these bytes now lie in the store."""
        digest = hashlib.sha256(data).hexdigest()
        self._reported.discard(digest)
        if self.has(digest):
            _note_use(self._found(_object_name(digest)))
        else:
            self._write(_object_name(digest), data)
        return digest

    def get(self, digest: str) -> bytes:
        """The bytes of an object; StoreError where it is missing or damaged (then it is quarantined)."""
        path = self._found(_object_name(digest))
        try:
            data = self._read(path)
        except OSError as error:
            raise self._lost(digest, f"missing ({error})") from error
        if hashlib.sha256(data).hexdigest() != digest:
            self._quarantine(path)
            raise self._lost(digest, "damaged, and now in quarantine/")
        return data

    def has(self, digest: str) -> bool:
        """Whether an object is there and whole; nothing is moved or logged."""
        try:
            return hashlib.sha256(self._read(self._found(_object_name(digest)))).hexdigest() == digest
        except OSError:
            return False

    def _lost(self, digest: str, how: str) -> StoreError:
        """The error for an object; logged once until it is put again, however often it is asked for."""
        message = f"object {digest[:16]} of the cache {self.root} is {how}"
        if digest not in self._reported:
            self._reported.add(digest)
            logger.warning("%s; what needs it will be made again", message)
        return StoreError(message)

    def path(self, digest: str) -> Path:
        """Where an object lies, checked now; for what must be opened by path, such as shared libraries.

        To be opened inside a block of using(), which keeps it there.
        """
        self.get(digest)
        return self._found(_object_name(digest))

    def write_ref(self, kind: str, key: str, value: Any) -> None:
        """Name a JSON value; the last writer of a name wins."""
        self._write(_ref_name(kind, key), seal(f"{kind}/{key}", value))

    def remember(self, kind: str, key: str, value: Any) -> None:
        """write_ref of what only saves time: where it cannot be written, that is logged once and all."""
        try:
            self.write_ref(kind, key, value)
        except StoreError as error:
            log_once(logger, logging.WARNING, f"{error}; going on without what would be remembered")

    def read_ref(self, kind: str, key: str) -> Any | None:
        """The value of a name, or None where there is none or it cannot be read (then it is quarantined)."""
        path = self._found(_ref_name(kind, key))
        try:
            value = unseal(f"{kind}/{key}", self._read(path))
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            self._quarantine(path)
            logger.warning("cache file %s was damaged: it %s; what it names will be made again", path, error)
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
        """A folder that new_folder wrote, every byte checked, or None where it is missing or damaged.

        No collection removes it as long as this store is in use. A damaged one is removed.
        """
        path = self._found(Path("folders", kind, key))
        self._lease(path, path)
        if not path.is_dir():
            self.let_go(path)
            return None
        why = self.fault_of(path)
        if why is None:
            _note_use(path)
            return path
        logger.warning("cache folder %s was damaged: %s; it will be made again", path, why)
        self.let_go(path)
        with contextlib.suppress(OSError, StoreError), self.temporary_folder() as temporary:
            os.replace(path, temporary / "damaged")
        return None

    def fault_of(self, path: Path) -> str | None:
        """Why a folder that new_folder wrote must not be used, or None where it may."""
        try:
            is_reachable = self._require_safe(path)
            objections = [
                f"{file.name} {why}"
                for file in path.rglob("*")
                if (why := trust.objection(file.lstat(), is_reachable=is_reachable))
            ]
            name = "/".join(path.parts[-3:])
            manifest = trust.read_file(path / MANIFEST, is_reachable=is_reachable)
            return objections[0] if objections else fault_of_folder(name, path, manifest)
        except OSError as error:
            return str(error)

    @contextlib.contextmanager
    def new_folder(self, kind: str, key: str) -> Iterator[Path]:
        """A temporary folder to fill, which takes its name only if the block ends without an error.

        Raises StoreError where the block raises an OSError: what it reads must raise errors of its own.
        """
        name = Path("folders", kind, key)
        target = self.home / name
        with self.temporary_folder() as temporary:
            content = temporary / "content"
            try:
                content.mkdir(mode=0o755)
                yield content
                seal_folder(name.as_posix(), content)
                self._make_folder(target.parent)
                self._lease(target, content)  # before anybody else can see it
                os.rename(content, target)
            except OSError as error:
                self.let_go(target)
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # else another process was first
                    raise self._unwritable(error) from error

    def _lease(self, path: Path, there: Path) -> None:
        """Let nobody collect a folder until this store ends, if it is there."""
        self.let_go(path)
        manifest = there / MANIFEST
        with contextlib.suppress(OSError):
            while path not in self._leases:
                self._leases[path] = os.open(manifest, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                flock(self._leases[path], shared=True, wait=True)
                if not lies_at(self._leases[path], manifest):  # removed meanwhile, perhaps made again
                    self.let_go(path)

    def let_go(self, path: Path) -> None:
        """Allow a collection to remove a folder that this store has open."""
        descriptor = self._leases.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)

    def outside_folder(self, name: str) -> Path:
        """A folder for what other software names, locks and checks by rules of its own."""
        path = self.home / "outside" / name
        self._make_folder(path, mode=0o700)
        return path

    def put_outside(self, name: str, data: bytes) -> bool:
        """Write a file of other software, by its path in the store; False where it is there as it is."""
        try:
            is_there = self._read(self.home / name) == data
        except OSError:
            is_there = False
        if not is_there:
            self._write(Path(name), data)
        return not is_there

    def build_folder(self) -> Path:
        """A folder for a compiler's own files: this process's alone where the store's will not do."""
        if PLAIN.fullmatch(str(self.home)) and has_locks(self.home):
            return self.outside_folder("inductor")
        return scratch.plain_folder(PLAIN)

    @contextlib.contextmanager
    def temporary_folder(self, *, for_compiler: bool = False) -> Iterator[Path]:
        """A private folder on the store's file system, removed at the end of the block.

        for_compiler: elsewhere, where the store's path is one that a compiler stumbles over.
        """
        with contextlib.ExitStack() as stack:
            try:
                if for_compiler and not PLAIN.fullmatch(str(self.home)):
                    parent = scratch.plain_folder(PLAIN)
                else:
                    parent = self._make_folder(self.home / "temporary", mode=0o700)
                path = stack.enter_context(scratch.private_folder(parent))
            except OSError as error:
                raise self._unwritable(error) from error
            yield path

    @contextlib.contextmanager
    def lock(self, name: str, *, shared: bool = False, wait: bool = True) -> Iterator[bool]:
        """Mutual exclusion among processes, so that many starting at once build a thing only once.

        Whether it is held: always, where wait is True.
        """
        with contextlib.ExitStack() as stack:
            try:
                folder = self._make_folder(self.home / "locks", mode=0o700)
                is_held = stack.enter_context(hold(folder / name, shared=shared, wait=wait))
            except OSError as error:
                raise self._unwritable(error) from error
            yield is_held

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Nothing is removed from the store inside the block: what is put can be named, what is there opened.

        For moments, since a collection waits for its end. Where nothing can be locked there is none.
        """
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(StoreError):
                stack.enter_context(self.lock(IN_USE, shared=True))
            yield

    def _found(self, name: Path) -> Path:
        """Where a file lies: among what this process made, else in the store."""
        made = self.home / name
        return made if made.exists() else self.root / name

    def _read(self, path: Path) -> bytes:
        return trust.read_file(path, is_reachable=self._require_safe(path.parent))

    def _require_safe(self, folder: Path) -> bool:
        """Whether others can reach what lies in a folder; PermissionError, and it goes to quarantine/, where
        somebody else could have put things into it."""
        if folder not in self._reachable:
            facts = folder.lstat()
            if folder in (self.root, self.home):
                self._reachable[folder] = trust.lets_others_in(facts)
                return self._reachable[folder]
            is_reachable = self._require_safe(folder.parent)
            why = trust.objection(facts, is_reachable=is_reachable)
            why = why or (None if stat.S_ISDIR(facts.st_mode) else "is no folder")
            if why is not None:
                self._quarantine(folder)
                logger.warning("%s %s: what lies in it is not used, and made again", folder, why)
                raise PermissionError(f"{folder} {why}")
            self._reachable[folder] = is_reachable and trust.lets_others_in(facts)
        return self._reachable[folder]

    def _make_folder(self, path: Path, *, mode: int = 0o755) -> Path:
        """The folder, which nobody else can write."""
        if not self.home.is_dir():  # somebody has removed it all
            self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._reachable.clear()
        if path == self.home:
            return path
        self._make_folder(path.parent)
        path.mkdir(exist_ok=True, mode=mode)
        if path not in self._reachable:
            with contextlib.suppress(PermissionError):
                self._require_safe(path)
            path.mkdir(exist_ok=True, mode=mode)  # again, where it was put aside
            self._require_safe(path)
        return path

    def _write(self, name: Path, data: bytes) -> None:
        target = self.home / name
        with self.temporary_folder() as folder:
            temporary = folder / "object"
            try:
                self._make_folder(target.parent)
                with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
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
            folder = self._make_folder(self.home / "quarantine", mode=0o700)
            os.replace(path, folder / f"{path.parent.name}-{path.name}-{secrets.token_hex(4)}")


def _object_name(digest: str) -> Path:
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):  # it may come from a record, and must not
        raise StoreError(f"{str(digest)[:100]!r} is no sha256 in hex")  # lead out of the store
    return Path("objects", digest[:2], digest[2:])


def _ref_name(kind: str, key: str) -> Path:
    for name in (kind, key):
        if not isinstance(name, str) or not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
            raise StoreError(f"{str(name)[:100]!r} is no name of the cache")
    return Path("refs", kind, f"{key}.json")


def _note_use(path: Path) -> None:
    """Let the time of change say when a file was used last."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > NOTE_USE_EVERY:
            os.utime(path)


def _close(leases: dict[Path, int]) -> None:
    for descriptor in leases.values():
        with contextlib.suppress(OSError):
            os.close(descriptor)
