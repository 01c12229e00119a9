"""A call in a thread of its own with a deep stack: recursion by its input would end the process otherwise."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
STACK = 512 * 2**20  # bytes of address space; what is not touched takes no memory
_starting = threading.Lock()  # the size is the process's, for whatever thread starts next


def call_deep(function: Callable[[], T]) -> T:
    """Returns what the function returns, raises what it raises; MemoryError where there is no such stack."""
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(function())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="lamina-deep-stack", daemon=True)
    with _starting:
        before = threading.stack_size(STACK)
        try:
            thread.start()
        except RuntimeError as error:
            raise MemoryError(f"no thread with a stack of {STACK} bytes can be started") from error
        finally:
            threading.stack_size(before)
    thread.join()
    if raised:
        raise raised[0]
    return returned[0]
