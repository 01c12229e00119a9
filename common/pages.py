"""What the system is asked about pages of memory: to make them large, or to take them back."""

import ctypes
import mmap
import sys

HUGE_PAGE = 1 << 21  # bytes, on x86-64 and on AArch64 with pages of 4 KiB
MADV_DONTNEED, MADV_HUGEPAGE = 4, 14


def advise_huge_pages(address: int, num_bytes: int) -> bool:
    """Ask the system to back memory that is not touched yet by huge pages; False where it has none.

    What it holds does not change, and memory that nobody touches stays unused; pages at both ends that are
    shared with others stay small.
    """
    return _advise(address, num_bytes, MADV_HUGEPAGE, HUGE_PAGE)


def give_pages_back(address: int, num_bytes: int) -> bool:
    """Give the system the whole pages of this memory, which read as zeros afterwards and can be written.

    The addresses stay the process's. False, and nothing has changed, where there is no whole page, or the
    system has no such call.
    """
    return _advise(address, num_bytes, MADV_DONTNEED, mmap.PAGESIZE)


def _advise(address: int, num_bytes: int, advice: int, least: int) -> bool:
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + num_bytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if not sys.platform.startswith("linux") or length < least:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    result: int = madvise(first, length, advice)
    return result == 0
