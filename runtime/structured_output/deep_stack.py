"""A call in a thread of its own with a deep stack: recursion by its input would end the process otherwise."""

import _thread
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")
STACK = 512 * 2**20  # bytes of address space; what is not touched takes no memory
_starting = threading.Lock()  # the size is the process's, for whatever thread starts next


class _Held:
    """Something that can be watched."""


def call_deep(function: Callable[[], T]) -> T:
    """Returns what the function returns, raises what it raises; MemoryError where there is no such stack."""
    returned: list[T] = []
    raised: list[BaseException] = []

    def run(held: _Held) -> None:
        try:
            returned.append(function())
        except BaseException as error:
            raised.append(error)
        finally:
            del held  # the frame lives on in an error's traceback

    # Thread.start() waits for its thread's first line for ever where memory is refused before it. What that
    # thread alone holds is gone with it in any case.
    ended: SimpleQueue[object] = SimpleQueue()
    held = _Held()
    watch = weakref.ref(held, ended.put)
    _start_deep(run, held)
    del held
    ended.get()
    del watch
    if raised:
        raise raised[0]
    if not returned:
        raise MemoryError("no memory is left for a thread to begin")
    return returned[0]


def _start_deep(run: Callable[[_Held], None], held: _Held) -> None:
    with _starting:
        before = threading.stack_size(STACK)
        try:
            _thread.start_new_thread(run, (held,))
        except RuntimeError as error:
            raise MemoryError(f"no thread with a stack of {STACK} bytes can be started") from error
        finally:
            threading.stack_size(before)
