"""Standard input and output that cannot do what is asked of them: one sentence each, never a traceback."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ..common.errors import RequestError


class OutputError(Exception):
    """Standard output takes no more, or cannot hold a character."""


class _Output:
    """A stream whose writing raises OutputError, and nothing that others take for an error of their own."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        written: int = _checked(self._stream, lambda: self._stream.write(text))
        return written

    def writelines(self, lines: Any) -> None:
        _checked(self._stream, lambda: self._stream.writelines(lines))

    def flush(self) -> None:
        _checked(self._stream, self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _checked(stream: Any, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except UnicodeEncodeError as error:
        character = ascii(error.object[error.start])
        raise OutputError(
            f"standard output is {stream.encoding}, which cannot hold {character}; set PYTHONIOENCODING=utf-8"
        ) from error
    except OSError as error:
        raise OutputError(f"standard output cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """Whatever is printed inside the block has reached standard output at its end, or OutputError is raised.

    Streams that were closed lead nowhere meanwhile: a file opened next would get their number.
    """
    was_closed = sys.stdout is None
    _occupy_closed()
    if was_closed:
        raise OutputError("standard output is closed; give it a file, or /dev/null")
    stream: Any = sys.stdout
    sys.stdout = _Output(stream)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OutputError:
        _drop(stream)
        raise
    finally:
        sys.stdout = stream


def _occupy_closed() -> None:
    """Standard streams that are closed, open on nothing."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for the rest of the process)


def _drop(stream: Any) -> None:
    """Have what is left in a stream's buffer go nowhere, or the interpreter tries again as it ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def read_all() -> str:
    """All of standard input; RequestError where it is closed or no text."""
    return _read(sys.stdin, lambda: sys.stdin.read())


def read_line(prompt: str) -> str:
    """A line of standard input, as input() gives it; RequestError where it is closed or no text."""
    return _read(sys.stdin, lambda: input(prompt))


def _read(stream: Any, action: Callable[[], str]) -> str:
    if stream is None:
        raise RequestError("standard input is closed; wanted text")
    try:
        text = action()
        text.encode()  # in some locales Python lets odd bytes through as surrogates
    except UnicodeDecodeError as error:
        raise _no_text(f"byte 0x{error.object[error.start]:02x}", error) from error
    except UnicodeEncodeError as error:
        raise _no_text(f"byte 0x{ord(error.object[error.start]) & 0xFF:02x}", error) from error
    except OSError as error:
        raise RequestError(f"standard input cannot be read: {error.strerror or error}") from error
    return text


def _no_text(found: str, error: UnicodeError) -> RequestError:
    encoding = getattr(sys.stdin, "encoding", "utf-8")
    return RequestError(f"standard input is no {encoding} text, as {found} in it shows; convert it")
