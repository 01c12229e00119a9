"""Folders for work in progress: each ends with its block, or is swept once its process is dead."""

import atexit
import contextlib
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .errors import StoreError
from .locks import hold

LOCK = ".lock"
SECONDS_TO_LOCK = 3600  # after which a folder without a lock will get none


@contextlib.contextmanager
def private_folder(parent: Path) -> Iterator[Path]:
    """A new folder below this one, removed at the end of the block; its lock says that it is in use."""
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = parent / secrets.token_hex(8)
    lock = path.with_name(path.name + LOCK)
    with hold(lock):  # before the folder is there, so that one without a holder is nobody's
        try:
            path.mkdir(mode=0o700)
            yield path
        finally:
            try:
                remove(path)
                remove(lock)
            except BaseException:  # a signal that comes just then leaves nothing either
                remove(path)
                remove(lock)
                raise


def sweep(parent: Path) -> None:
    """Remove the folders whose processes ended without doing so."""
    with contextlib.suppress(OSError):
        names = {name.removesuffix(LOCK) for name in os.listdir(parent)}
        for name in sorted(names):
            lock = parent / (name + LOCK)
            with hold(lock, wait=False) as is_nobodys:
                if is_nobodys:
                    remove(parent / name)
                    remove(lock)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all below it, as far as it is there and can be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


class TemporaryFolder:
    """A new folder for temporary files that this user alone may enter, until remove().

    What a process left of this kind that was ended by force is removed before: nobody holds its lock.
    """

    def __init__(self, kind: str, base: str | Path | None = None) -> None:
        """base: where it lies, of TMPDIR unless given. OSError where it cannot be made."""
        base = Path(tempfile.gettempdir() if base is None else base)
        prefix = f"lamina-{kind}-"
        _sweep_left(base, prefix)
        self._holding = contextlib.ExitStack()  # the lock is given back with this object at the latest
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
            try:
                self._holding.enter_context(hold(self.path / LOCK))
                return
            except FileNotFoundError:
                continue  # another process took it for left behind, between its lock's file and its lock

    def remove(self) -> None:
        """Remove it with all below it; a second time is nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._holding.close()


def _sweep_left(base: Path, prefix: str) -> None:
    """Remove the folders of ours in which nobody holds the lock; one without is just being made, or old."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(base):
            if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False):
                _remove_left(Path(entry.path))


def _remove_left(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it goes meanwhile, or is another user's
        facts = folder.lstat()
        if facts.st_uid != os.getuid():
            return
        if not (folder / LOCK).exists():
            if time.time() - facts.st_mtime > SECONDS_TO_LOCK:
                remove(folder)
            return
        with hold(folder / LOCK, wait=False) as is_nobodys:
            if is_nobodys:
                remove(folder)


_plain: list[TemporaryFolder] = []


def plain_folder(plain: re.Pattern[str]) -> Path:
    """A private folder of this process, removed at its end, whose path matches; the same at every call."""
    if not (_plain and _plain[0].path.is_dir()):
        bases = [base for base in (tempfile.gettempdir(), "/tmp", "/var/tmp") if plain.fullmatch(base)]
        if not bases:
            raise StoreError(f"TMPDIR is {tempfile.gettempdir()!r}; wanted a path without spaces and quotes")
        _plain[:] = [TemporaryFolder("build", bases[0])]
        atexit.register(_plain[0].remove)
    return _plain[0].path
