"""A ring of messages in memory that processes share: one writes, some read, and nothing of it has a name.

The memory is a file without a name, so that whatever ends the processes leaves nothing behind. Who waits for
a message says so here, and sleeps on a socket of its own; a byte there only says that it is worth looking. To
look again, or to be interrupted at any line, loses no message: one is there when the count of messages says
so, and read when its reader says so.
"""

import mmap
import os
import tempfile
import threading

from ...common.errors import WireError

WORD = 8
NUM_PLACES = 1024  # messages that are not read yet, at most
CAPACITY = 256 << 20  # bytes of them; what is never written takes no memory
LINE = 64  # bytes that processors share or not as a whole: words of two processes lie in two


def nameless_file() -> int:
    """A file descriptor of an empty file that no folder has, to be closed."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("lamina", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedRing:
    """Frames in memory, each for every reader; the count of them, and of how many each reader has read."""

    def __init__(self, fd: int, num_readers: int, reader: int | None = None) -> None:
        """reader: this process's number among the readers, None for the writer. The fd can be closed then."""
        lines = [LINE // WORD * number for number in range(1, num_readers + 2)]
        self._readers, self._places = lines[:-1], lines[-1]  # where the words of each, and of frames, begin
        self._own = None if reader is None else self._readers[reader]
        self._start = LINE * (1 + num_readers) + 2 * WORD * NUM_PLACES
        self._map = mmap.mmap(fd, self._start + CAPACITY)
        self._memory = memoryview(self._map)
        self._words = self._memory[: self._start].cast("Q")
        self._fence = threading.Lock()
        self._end = 0  # of the last frame, in bytes from the start

    @staticmethod
    def new_memory(num_readers: int) -> int:
        """A file descriptor of memory for a ring of so many readers, to be passed on and to be closed."""
        fd = nameless_file()
        os.ftruncate(fd, LINE * (1 + num_readers) + 2 * WORD * NUM_PLACES + CAPACITY)
        return fd

    def write(self, frame: bytes) -> bool:
        """Put a frame behind the others; False where there is no room until readers have read.

        WireError for a frame that is larger than the ring.
        """
        size, words = len(frame), self._words
        if size > CAPACITY:
            raise WireError(f"a frame has {size} bytes; wanted at most {CAPACITY}")
        written = words[0]
        start = self._room(size, written, min([words[place] for place in self._readers]))
        if start is None:
            return False
        self._memory[self._start + start : self._start + start + size] = frame
        place = self._place(written)
        words[place], words[place + 1] = start, size
        self._end = start + size
        self._pass_fence()
        words[0] = written + 1
        return True

    def peek(self) -> memoryview | None:
        """The oldest frame that was not read, as it lies there until pass_by(); None where there is none."""
        assert self._own is not None, "the writer reads nothing"
        words = self._words
        read = words[self._own]
        if read == words[0]:
            return None
        self._pass_fence()
        place = self._place(read)
        start = self._start + words[place]
        return self._memory[start : start + words[place + 1]]

    def pass_by(self) -> None:
        """The frame of peek() was read."""
        assert self._own is not None, "the writer reads nothing"
        self._words[self._own] += 1

    def begin_wait(self) -> bool:
        """Say that this reader is about to sleep, and is to be woken; False where it is not to: it can read.

        Either the writer sees that, or this reader its frame: each writes its own word before it reads the
        other's.
        """
        assert self._own is not None, "the writer reads nothing"
        self._words[self._own + 1] = True
        self._pass_whole_fence()
        return self._words[self._own] == self._words[0]

    def end_wait(self) -> None:
        """Say that this reader is awake, and looks by itself."""
        assert self._own is not None, "the writer reads nothing"
        self._words[self._own + 1] = False

    def waiting_readers(self) -> list[int]:
        """The numbers of readers to be woken after a write; perhaps in vain of one that was interrupted."""
        self._pass_whole_fence()
        return [number for number, place in enumerate(self._readers) if self._words[place + 1]]

    def beat(self, nanoseconds: int, is_building: bool) -> None:
        """Say that the writer lives, and whether it builds something that may hold up all of its threads."""
        self._words[1], self._words[2] = nanoseconds, is_building

    @property
    def last_beat(self) -> tuple[int, bool]:
        """What the writer said last; (0, False) before."""
        return self._words[1], bool(self._words[2])

    def close(self) -> None:
        """Let go of the memory; frames of peek() must be released before."""
        self._words.release()
        self._memory.release()
        self._map.close()

    def _place(self, number: int) -> int:
        """Where the start of a frame stands, and its size after it."""
        return self._places + 2 * (number % NUM_PLACES)

    def _room(self, size: int, written: int, oldest: int) -> int | None:
        """Where so many bytes are free: at the beginning when all was read, so that little memory is used."""
        if written == oldest:
            return 0
        if written - oldest >= NUM_PLACES:
            return None
        first = self._words[self._place(oldest)]
        if self._end < first:  # the newest lie at the beginning again
            return self._end if self._end + size < first else None
        if self._end + size <= CAPACITY:
            return self._end
        return 0 if size < first else None

    def _pass_fence(self) -> None:
        """No word is read or written before what stands before it: a lock orders memory as it is taken."""
        with self._fence:
            pass

    def _pass_whole_fence(self) -> None:
        """Nor is a word read before what is written before it: no lock is taken before it was let go of."""
        with self._fence:
            pass
        with self._fence:
            pass
