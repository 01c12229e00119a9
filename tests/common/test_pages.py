"""Pages in which memory comes or that it is given back in: what lies beside them stays."""

import ctypes
import mmap
import sys

import pytest

from lamina.common.pages import HUGE_PAGE, advise_huge_pages, give_pages_back

from ..resident_pages import resident_of

ON_LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="others have no such advice")


@ON_LINUX
def test_memory_holds_what_it_held():
    with mmap.mmap(-1, 4 * HUGE_PAGE) as memory:
        memory[:4], memory[-4:] = b"left", b"last"
        view = ctypes.c_char.from_buffer(memory)
        advise_huge_pages(ctypes.addressof(view) + 3, len(memory) - 5)
        assert memory[:4] + memory[-4:] == b"leftlast"
        del view


def test_memory_below_a_huge_page_is_left_alone():
    buffer = ctypes.create_string_buffer(1000)
    assert not advise_huge_pages(ctypes.addressof(buffer), 1000)
    assert not advise_huge_pages(mmap.PAGESIZE + 1, HUGE_PAGE), "no whole huge page of whole pages is within"


@ON_LINUX
def test_whole_pages_are_given_back_and_no_byte_beside_them():
    with mmap.mmap(-1, 10 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE) as memory:
        memory[:] = b"x" * len(memory)
        view = ctypes.c_char.from_buffer(memory)
        address, size = ctypes.addressof(view), 8 * mmap.PAGESIZE
        assert give_pages_back(address + 100, size)
        assert resident_of([(address, len(memory))]) == 3 * mmap.PAGESIZE
        end = 100 + size
        assert not memory[mmap.PAGESIZE : end - end % mmap.PAGESIZE].strip(b"\0")
        assert memory[: mmap.PAGESIZE] + memory[end - end % mmap.PAGESIZE :] == b"x" * 3 * mmap.PAGESIZE
        assert not give_pages_back(address + 1, mmap.PAGESIZE), "no whole page is within"
        del view
