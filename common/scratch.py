"""Folders for work in progress: each ends with its block, or is swept once its process is dead."""

import atexit
import contextlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .errors import StoreError
from .locks import hold

LOCK = ".lock"


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
            remove(path)
            remove(lock)


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


_plain: list[Path] = []


def plain_folder(plain: re.Pattern[str]) -> Path:
    """A private folder of this process, removed at its end, whose path matches; the same at every call."""
    if not (_plain and _plain[0].is_dir()):
        bases = [base for base in (tempfile.gettempdir(), "/tmp", "/var/tmp") if plain.fullmatch(base)]
        if not bases:
            raise StoreError(f"TMPDIR is {tempfile.gettempdir()!r}; wanted a path without spaces and quotes")
        _plain[:] = [Path(tempfile.mkdtemp(prefix="lamina-build-", dir=bases[0]))]
        atexit.register(shutil.rmtree, _plain[0], ignore_errors=True)
    return _plain[0]
