"""Ctrl-C that ends the process at once: where torch is imported or code generated, exceptions get lost."""

import contextlib
import os
import signal
from types import FrameType
from typing import Any

INTERRUPTED = 130  # the exit code that shells know
SHOW_CURSOR = b"\x1b[?25h\n"  # a progress bar may have hidden it


def exit_on_interrupt() -> Any:
    """From now on the first SIGINT ends this process with exit code 130; returns how it was handled before.

    What was half written has no name in the store, and is swept later. Compilers that were started end by the
    same Ctrl-C.
    """
    return signal.signal(signal.SIGINT, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, SHOW_CURSOR if os.isatty(2) else b"\n")
    os._exit(INTERRUPTED)
