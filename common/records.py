"""Locks where the file system knows none: a record for each holder, whose name says whether it still lives.

Whoever wants the lock makes a record of a new name, then looks at the others: of two at least
one sees the other and steps back. Records of dead processes count for nothing; as no name is ever used again,
anybody may remove them.
"""

import contextlib
import logging
import os
import random
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from .logging import get_logger, log_once

logger = get_logger("store")
SHORTEST_PAUSE, LONGEST_PAUSE = 0.002, 0.1  # seconds
PROC = Path("/proc")
ALONE, SHARED = "alone", "shared"


@contextlib.contextmanager
def hold_by_record(folder: Path, *, shared: bool, wait: bool) -> Iterator[bool]:
    """Whether the lock that this folder stands for is held inside the block: always, where wait is True."""
    owner, pause, is_held = os.getpid(), SHORTEST_PAUSE, False
    parts = (SHARED if shared else ALONE, *_whoami(), secrets.token_hex(8))
    record = folder / ",".join(parts)
    try:
        while not (is_held := _claim(record)) and wait:
            time.sleep(random.uniform(0, pause))
            pause = min(2 * pause, LONGEST_PAUSE)
        yield is_held
    finally:
        if os.getpid() == owner:  # and no child of a fork
            _remove(record)


def _claim(record: Path) -> bool:
    """Whether a record is there, and none against it."""
    _make_folder(record.parent)
    try:
        os.close(os.open(record, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        names = os.listdir(record.parent)
    except (FileNotFoundError, NotADirectoryError):  # whoever held it alone has removed it all
        return False
    if record.name in names and not any(_is_against(record, name) for name in names):
        return True
    _remove(record)
    return False


def _make_folder(folder: Path) -> None:
    """In place of the empty file that was to be locked, if it lies there."""
    if not folder.is_dir():
        _remove(folder)
        with contextlib.suppress(FileExistsError):  # another was faster
            folder.mkdir(mode=0o700)


def _is_against(record: Path, name: str) -> bool:
    """Whether another record keeps this one from holding; one of a dead process is removed."""
    other = record.with_name(name)
    if name == record.name or (name.startswith(SHARED) and record.name.startswith(SHARED)):
        return False
    _, host, pids, boot, pid, start, _ = name.split(",")
    _, own_host, own_pids, own_boot, *_ = record.name.split(",")
    if host != own_host or (boot == own_boot and pids != own_pids):
        holder = f"process {pid} of {host}, which cannot be seen from here"
        log_once(logger, logging.WARNING, f"waiting for {holder}; if it has ended, remove {other}")
        return True
    if boot == own_boot and _started(pid) == start:
        return True
    _remove(other)
    return False


def _whoami() -> tuple[str, ...]:
    """Host, namespace of process ids, boot, process id and its start: what says whether a holder lives."""
    host = quote(os.uname().nodename, safe="")[:100]
    try:
        pids, boot = (
            str((PROC / "self/ns/pid").stat().st_ino),
            (PROC / "sys/kernel/random/boot_id").read_text(),
        )
    except OSError:
        pids, boot = "0", "0"
    pid = str(os.getpid())
    return host, pids, boot.strip(), pid, _started(pid) or "0"


def _started(pid: str) -> str | None:
    """When a process began, in ticks since the boot; "0" where that is unknown, None for one that ended."""
    try:
        facts = (PROC / pid / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        if (PROC / "self").exists():
            return None
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            return "0"
        return "0"
    return None if facts[0] in "ZX" else facts[19]


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        path.unlink()
