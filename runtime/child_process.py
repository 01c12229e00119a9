"""A process that this one spawns: started, waited for and ended here, and what it does on its own side."""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ..common.errors import shown

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
BOOT = (
    "import sys; sys.path[:] = sys.argv[COUNT:]; del sys.argv[COUNT:]; "
    "from lamina.runtime.MODULE import main; main()"
)


class ChildProcess:
    """A process in a session of its own, with a thread that starts it and waits for its end.

    The kernel ends a process with the thread that started it, so that thread stays as long as the process.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        on_end: Callable[[str], None],
        *,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """module: of the package; its main() runs. on_end(why): called last, in the thread.

        sys.argv[1] is this process's id there, and the arguments follow; pass_fds stay open. environment:
        its variables, in place of those of this process.
        """
        self.pid: int | None = None
        self._module, self._arguments, self._on_end = module, arguments, on_end
        self._pass_fds, self._environment = tuple(pass_fds), environment
        self._parent = os.getpid()
        self._is_reaped = self._is_killed = False
        self._is_spawned = threading.Event()
        self.wait_until_spawned = self._is_spawned.wait  # or until it is known that it cannot be
        self._thread = threading.Thread(target=self._run, name=f"{module}-waiter", daemon=True)
        self.start = self._thread.start
        self.join = self._thread.join

    @property
    def is_alive(self) -> bool:
        """Whether the process, or the thread that waits for it, has not ended."""
        return self._thread.is_alive()

    def kill(self) -> None:
        """End it by force, with whatever it has started; may be called at any line of any thread."""
        self._is_killed = True
        if self.pid is not None and not self._is_reaped and os.getpid() == self._parent:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _run(self) -> None:
        try:
            reason = "it was closed" if self._is_killed else self._wait(self._spawn())
        except Exception as error:  # no memory, no interpreter, a path that is none
            reason = f"its process could not be started: {shown(error)}"
        self._is_spawned.set()
        self._on_end(reason)

    def _spawn(self) -> "subprocess.Popen[bytes]":
        boot = BOOT.replace("COUNT", str(2 + len(self._arguments))).replace("MODULE", self._module)
        path = [os.path.abspath(entry) for entry in sys.path]
        process = subprocess.Popen(
            [sys.executable, "-c", boot, str(self._parent), *self._arguments, *path],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what it prints is a log, too
            start_new_session=True,
            pass_fds=self._pass_fds,
            env=self._environment,
        )
        self.pid = process.pid
        share_scheduling(process.pid)
        self._is_spawned.set()
        if self._is_killed:  # meanwhile
            self.kill()
        return process

    def _wait(self, process: "subprocess.Popen[bytes]") -> str:
        """Wait for the process's end, and for that of all that it started; returns why it ended."""
        with suppress(ChildProcessError):  # who ignores SIGCHLD has no children to wait for
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # while nobody else can have its number
        self._is_reaped = True
        return _ending(process.pid, process.wait())


def share_scheduling(pid: int) -> None:
    """Have the session of another process be as nice as that of this one, where the kernel weighs sessions.

    The niceness that a process inherits counts among those of its own session alone there.
    """
    with suppress(OSError, ValueError, IndexError):  # of a kernel that does not, or no right to do it
        nice = Path("/proc/self/autogroup").read_text().split()[-1]
        if int(nice):
            Path(f"/proc/{pid}/autogroup").write_text(nice)


def _ending(pid: int, status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"its process {pid} ended with exit status {status}"
    known = {number.value: number.name for number in signal.Signals}
    why = ", as the kernel does for want of memory" if status == -signal.SIGKILL else ""
    return f"its process {pid} was ended by {known.get(-status, f'signal {-status}')}{why}"


def leave_signals_to_parent() -> None:
    """Ignore what is meant for the process that serves, which ends this one: Ctrl-C and SIGTERM."""
    for interrupt in (signal.SIGINT, signal.SIGTERM):
        signal.signal(interrupt, signal.SIG_IGN)


def end_with(parent: int, name: str) -> None:
    """Have the kernel end this process when its parent ends, however that happens; name: at most 15 bytes."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_NAME, name.encode())
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def log_to_stderr(level: int, whose: str) -> None:
    """Logs go where those of the parent go by default, and say whose they are."""
    handler, root = logging.StreamHandler(), logging.getLogger("lamina")
    handler.setFormatter(logging.Formatter(f"{whose}: %(message)s"))
    root.addHandler(handler)
    root.setLevel(level)
    root.propagate = False


class ParentWatch(threading.Thread):
    """Beats from a thread of its own, and ends this process group where its parent has gone."""

    def __init__(self, parent: int, seconds: float) -> None:
        super().__init__(name="lamina-heartbeat", daemon=True)
        self.beat: Callable[[], None] = _nothing
        self._parent, self._seconds = parent, seconds

    def run(self) -> None:
        """Beats as long as the parent lives."""
        while os.getppid() == self._parent:
            self.beat()
            time.sleep(self._seconds)
        os.killpg(os.getpgrp(), signal.SIGKILL)  # and compilers that it may have started


def _nothing() -> None:
    """Before there is anybody to hear it."""
