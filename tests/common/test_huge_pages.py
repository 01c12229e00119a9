"""Memory in huge pages: what it holds stays, and less than a huge page is left alone."""

import ctypes
import mmap
import sys

import pytest

from lamina.common.huge_pages import HUGE_PAGE, advise_huge_pages


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="others have no such advice")
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
