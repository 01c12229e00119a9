"""Tensors that end where memory does: who reads or writes beyond them dies of it."""

import ctypes
import mmap

import torch
from torch import Tensor

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def at_the_end(tensor: Tensor) -> Tensor:
    """A contiguous copy of a tensor whose last byte is the last before a page that nobody may touch."""
    size, page = tensor.numel() * tensor.element_size(), mmap.PAGESIZE
    room = -(-size // page) * page
    memory = mmap.mmap(-1, room + page)  # lives as long as the tensor that is made of it
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    if LIBC.mprotect(whole.data_ptr() + room, page, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    copy: Tensor = whole[room - size : room].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def making_ended(x: Tensor) -> Tensor:
    """The same at the end of memory, as is all that is made like it by new_empty."""
    ended = at_the_end(x)
    ended.new_empty = lambda shape: at_the_end(torch.full(shape, torch.nan, dtype=x.dtype))  # type: ignore
    return ended
