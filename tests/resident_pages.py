"""Which pages of memory the system keeps for this process."""

import ctypes
import mmap


def resident_of(ranges):
    """Bytes of whole pages at these addresses that the system keeps for the process, whatever they hold."""
    mincore, found = ctypes.CDLL(None).mincore, 0
    for address, size in ranges:
        for page in range(address // mmap.PAGESIZE, -(-(address + size) // mmap.PAGESIZE)):
            is_there = ctypes.c_ubyte(0)  # and stays so where nothing is mapped any more
            mincore(ctypes.c_void_p(page * mmap.PAGESIZE), ctypes.c_size_t(1), ctypes.byref(is_there))
            found += (is_there.value & 1) * mmap.PAGESIZE
    return found
