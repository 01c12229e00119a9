"""Locks among processes, on files that end with whoever holds them, however that ends."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def hold(path: Path, *, shared: bool = False, wait: bool = True) -> Iterator[bool]:
    """Whether the lock of this file is held inside the block: always, where wait is True.

    The file is made where it is missing, and may be removed by whoever holds it alone: a lock counts only
    while its file lies where it was found.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            is_held = flock(descriptor, shared=shared, wait=wait)
            if is_held and not lies_at(descriptor, path):
                continue
            yield is_held
            return
        finally:
            os.close(descriptor)


def flock(descriptor: int, *, shared: bool, wait: bool) -> bool:
    """Lock an open file; False where another has it and wait is False."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def lies_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))
