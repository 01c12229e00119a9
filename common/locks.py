"""Locks among processes, on files that end with whoever holds them, however that ends."""

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from .logging import get_logger, log_once
from .records import hold_by_record

logger = get_logger("store")
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of a file system that knows none


@contextlib.contextmanager
def hold(path: Path, *, shared: bool = False, wait: bool = True) -> Iterator[bool]:
    """Whether the lock of this file is held inside the block: always, where wait is True.

    The file is made where it is missing, and may be removed by whoever holds it alone: a lock counts only
    while its file lies where it was found. On a file system without locks it is a folder of records.
    """
    with contextlib.ExitStack() as stack:
        try:
            is_held = stack.enter_context(_hold_by_flock(path, shared=shared, wait=wait))
        except OSError as error:
            if error.errno not in (*NO_LOCKS, errno.EISDIR):
                raise
            log_once(
                logger, logging.INFO, f"{path.parent} knows no locks ({error.strerror}): records hold them"
            )
            is_held = stack.enter_context(hold_by_record(path, shared=shared, wait=wait))
        yield is_held


@contextlib.contextmanager
def _hold_by_flock(path: Path, *, shared: bool, wait: bool) -> Iterator[bool]:
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


def has_locks(folder: Path) -> bool:
    """Whether the file system of a folder knows locks, which other software may need."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flock(descriptor, shared=True, wait=False)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    finally:
        os.close(descriptor)
    return True


def lies_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))
