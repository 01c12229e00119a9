"""Kernel calls that native code makes in a row: their order, and where it ends."""

import ctypes

import pytest

from lamina.custom_ops._shared.call_capture import PackedCall
from lamina.custom_ops._shared.packed_calls import joined

Entry = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p)


@pytest.fixture
def kernels():
    """kernels(argument, result) -> a call of an entry point; and what was called so far."""
    called = []

    @Entry
    def double(argument):
        called.append(argument)
        return 2 * int(argument)

    return lambda number: PackedCall(double, str(number).encode()), called


def make(calls):
    return [call() == result for call, result in calls]


def test_neighbours_are_one_call_and_all_keep_their_order(kernels):
    kernel, called = kernels
    calls = joined([(kernel(1), 2), (kernel(2), 4), (lambda: called.append("other"), None), (kernel(3), 6)])
    assert len(calls) == 3
    for _ in range(2):
        assert make(calls) == [True, True, True]
    assert called == [b"1", b"2", "other", b"3"] * 2


def test_nothing_is_called_behind_a_result_that_was_not_expected(kernels):
    kernel, called = kernels
    calls = joined([(kernel(1), 2), (kernel(2), 5), (kernel(3), 6)])
    assert make(calls) == [False]
    assert called == [b"1", b"2"]


def test_no_calls_are_none():
    assert joined([]) == []
