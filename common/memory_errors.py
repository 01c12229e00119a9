"""Errors that say that a machine, or a limit of this process, has no more memory to give."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import LaminaError, LoadError

# torch has a class for GPUs alone; of a CPU's memory it raises RuntimeErrors.
WORDS = ("can't allocate memory", "cannot allocate memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was refused, by Python, the system, torch or safetensors."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return any(word in str(error).lower() for word in WORDS)
    return isinstance(error, MemoryError)


def in_brief(error: BaseException) -> str:
    """Returns the first line of what was said of it, or what is known where that is nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "an allocation was refused"


@contextmanager
def memory_explained(what: str, remedy: str) -> Iterator[None]:
    """Memory that is refused within is a LoadError with what it was for and what to do."""
    try:
        yield
    except LaminaError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise LoadError(f"memory ran out while {what}: {in_brief(error)}; {remedy}") from error
