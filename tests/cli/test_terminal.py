"""`lamina chat` on a terminal: lines are edited, pasted ones stay one message, Ctrl-C clears a half line."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

readline = pytest.importorskip("readline")
pytestmark = pytest.mark.skipif(
    "libedit" in (readline.__doc__ or ""), reason="libedit does not take pasted lines together"
)
ROOT = Path(__file__).resolve().parent.parent.parent
PASTE = "\x1b[200~first line\nsecond line\x1b[201~"
# The conversation itself, on a terminal, with a runtime that repeats what it is asked.
SCRIPT = """
from lamina.cli.chat import Conversation
from lamina.runtime.engine.outputs import StreamDelta

class Echo:
    def stream_chat(self, messages, params):
        text = f"<{messages[-1]['content']!r} of {len(messages)}>"
        yield StreamDelta(request_id="0", index=0, text=text, token_ids=(1,))

Conversation(Echo(), None, None).run()
print("left")
"""


class Terminal:
    """A chat at the other end of a pseudo-terminal."""

    def __init__(self):
        self.master, slave = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "INPUTRC": "/dev/null"}
        command = [sys.executable, "-c", SCRIPT]
        pipes = {"stdin": slave, "stdout": slave, "stderr": slave}
        self.process = subprocess.Popen(
            command, **pipes, env=environment, start_new_session=True, preexec_fn=_take_terminal
        )
        os.close(slave)
        self.shown = ""

    def until(self, pattern, seconds=120):
        """Read what is shown until it matches."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.shown)):
            assert time.monotonic() < end, self.shown
            if select.select([self.master], [], [], 0.5)[0]:
                self.shown += os.read(self.master, 4096).decode(errors="replace")
        shown, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return shown

    def type(self, text):
        os.write(self.master, text.encode())

    def interrupt(self):
        """Ctrl-C once the chat waits for a key: Python sees one only then, or at the next key."""
        while self._state() != "S":
            time.sleep(0.01)
        self.type("\x03")

    def _state(self):
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0]


def _take_terminal():
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal():
    terminal = Terminal()
    try:
        terminal.until("> ")
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)


def test_ctrl_c_clears_a_half_line_and_the_conversation_goes_on(terminal):
    terminal.type("half a li")
    terminal.until("half a li")
    terminal.interrupt()
    terminal.until("> ")
    terminal.type("whole\r")
    assert "'whole' of 1" in terminal.until(r"of \d")
    terminal.until("> ")
    for _ in range(2):
        terminal.interrupt()
        terminal.until("> ")
    terminal.type("\x04")
    terminal.until("left")
    assert terminal.process.wait(60) == 0


def test_pasted_lines_are_one_message(terminal):
    terminal.type(PASTE)
    terminal.until("second line")
    terminal.type("\r")
    assert r"first line\nsecond line' of 1" in terminal.until(r"of \d")
    terminal.until("> ")
    terminal.type("/etc/hosts is a file\r")
    terminal.until("unknown command")
    terminal.type("\x1b[200~/a path\nof two lines\x1b[201~\r")
    assert r"/a path\nof two lines' of 3" in terminal.until(r"of \d")
