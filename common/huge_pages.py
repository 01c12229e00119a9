"""Large pages for memory that is read a little everywhere, so that the CPU need not look its addresses up."""

import ctypes
import mmap
import sys

HUGE_PAGE = 1 << 21  # bytes, on x86-64 and on AArch64 with pages of 4 KiB
MADV_HUGEPAGE = 14


def advise_huge_pages(address: int, num_bytes: int) -> bool:
    """Ask the system to back memory that is not touched yet by huge pages; False where it has none.

    What it holds does not change, and memory that nobody touches stays unused; pages at both ends that are
    shared with others stay small.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + num_bytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if not sys.platform.startswith("linux") or length < HUGE_PAGE:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    result: int = madvise(first, length, MADV_HUGEPAGE)
    return result == 0
