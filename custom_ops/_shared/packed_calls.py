"""Kernel calls made one after another by native code, without Python between them."""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from .build import load_thread_pool
from .call_capture import PackedCall

Expected = tuple[Callable[[], Any], Any]  # a call, and what it is to return


class _Call(ctypes.Structure):
    """struct PackedCall of csrc/thread_pool/packed_calls.h."""

    _fields_ = (("entry", ctypes.c_void_p), ("argument", ctypes.c_void_p), ("result", ctypes.c_int64))


class PackedCalls:
    """Calls that native code makes in their order; returns how many returned what was expected of them.

    None is made behind the first that did not. Python's own part of a call takes many times as long where
    the kernel before has filled the caches.
    """

    def __init__(self, calls: Sequence[tuple[PackedCall, int]]) -> None:
        self._kept = [call for call, _ in calls]  # the arguments are where they point to
        made = [
            _Call(_address_of(call.entry), _address_of(ctypes.c_char_p(call.argument)), result)
            for call, result in calls
        ]
        self._calls = (_Call * len(made))(*made)
        self._make = load_thread_pool().lamina_make_calls
        self._make.argtypes, self._make.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64

    def __call__(self) -> int:
        made: int = self._make(self._calls, len(self._calls))
        return made


def joined(calls: Iterable[Expected]) -> list[Expected]:
    """The same calls, each row of kernels among them as one."""
    found: list[Expected] = []
    for _, group in groupby(calls, lambda each: isinstance(each[0], PackedCall)):
        row = list(group)
        packed = [(call, result) for call, result in row if isinstance(call, PackedCall)]
        found += [(PackedCalls(packed), len(packed))] if packed else row
    return found


def _address_of(pointer: Any) -> int | None:
    return ctypes.cast(pointer, ctypes.c_void_p).value
