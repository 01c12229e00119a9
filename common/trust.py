"""Whether somebody else could have put or changed a file: code is loaded from the store, so nobody may."""

import os
import stat
from pathlib import Path

from .errors import StoreError
from .logging import get_logger

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH

logger = get_logger("store")


def objection(facts: os.stat_result, *, is_reachable: bool = True) -> str | None:
    """Why code must not be loaded from what has these facts, None where it may.

    It may where it is the user's own or root's, and nobody else can write it. What lies below a folder that
    others cannot enter is not reachable, whatever its mode.
    """
    if facts.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {facts.st_uid}"
    if is_reachable and not stat.S_ISLNK(facts.st_mode) and facts.st_mode & OTHERS_WRITE:
        return f"can be written by others (mode {stat.S_IMODE(facts.st_mode):o})"
    return None


def lets_others_in(facts: os.stat_result) -> bool:
    """Whether anybody else can reach what lies in a folder."""
    return bool(facts.st_mode & OTHERS_ENTER)


def take_over(root: Path) -> bool:
    """Make a folder the user's alone; True where others could write into it until now.

    Raises StoreError where it belongs to somebody else, or stays open to others.
    """
    facts = root.stat()
    mode = stat.S_IMODE(facts.st_mode)
    remedy = "or set LAMINA_CACHE_DIR to a folder of your own"
    if facts.st_uid not in (os.geteuid(), 0):
        raise StoreError(
            f"cache folder {root} belongs to user {facts.st_uid}, and code is loaded from it; chown it to "
            f"user {os.geteuid()}, {remedy}"
        )
    if not facts.st_mode & OTHERS_WRITE:
        return False
    try:
        root.chmod(0o700)
        is_closed = not root.stat().st_mode & OTHERS_WRITE
    except OSError:
        is_closed = False
    if not is_closed:
        raise StoreError(
            f"cache folder {root} can be written by others (mode {mode:o}), and code is loaded from it; have "
            f"its owner run `chmod go-w {root}`, {remedy}"
        )
    return True


def read_file(path: Path, *, is_reachable: bool) -> bytes:
    """The bytes of a regular file; PermissionError where somebody else could have written them."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        why = objection(facts, is_reachable=is_reachable)
        if why is None and not stat.S_ISREG(facts.st_mode):
            why = "is no regular file"
        if why is not None:
            raise PermissionError(f"{path} {why}")
        return file.read()
