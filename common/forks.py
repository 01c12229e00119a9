"""Processes that were forked from one that computed: the threads of its kernels did not come along."""

import os
import threading
from pathlib import Path

from .errors import UnsupportedError

TASKS = Path("/proc/self/task")  # the threads of this process, those that Python knows of and others


class _State:
    had_threads = False  # native ones, when this process was last forked
    lost_threads = False  # whether this process is the child of one that had them


def _before_fork() -> None:
    num_tasks = len(list(TASKS.iterdir())) if TASKS.is_dir() else 0
    _State.had_threads = num_tasks > threading.active_count()


def _in_child() -> None:
    _State.lost_threads = _State.lost_threads or _State.had_threads


os.register_at_fork(before=_before_fork, after_in_child=_in_child)


def lost_threads() -> bool:
    """Whether a pool of threads stayed behind that this process believes to have: waiting for it hangs."""
    return _State.lost_threads


def require_same_process(pid: int) -> None:
    """UnsupportedError in a child of the process that made a runtime: its locks and threads are not there."""
    if os.getpid() != pid:
        raise UnsupportedError(
            f"this runtime belongs to process {pid}, and process {os.getpid()} was forked from it without "
            "its threads; make a runtime in the child, and start children by spawn: "
            "multiprocessing.get_context('spawn'), DataLoader(multiprocessing_context='spawn')"
        )
