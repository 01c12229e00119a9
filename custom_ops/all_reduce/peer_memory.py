"""Memory of a process's GPU that other ranks' kernels read, and theirs: made, exchanged, tried, freed."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...common.errors import GroupError, KernelBuildError, LaminaError, UnsupportedError
from .._shared.build_cuda import load_cuda_kernel
from .group import Group, said_by_all
from .peers import HEADER_BYTES, MAX_BYTES, MAX_RANKS, Peers, memory_bytes, most_blocks

HANDLE_BYTES = 64  # of cudaIpcMemHandle_t
MARK_BYTES = 4096  # that ranks read of each other before they rely on it
BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same for all processes of one running system
T = TypeVar("T")


class PeerMemory:
    """Memory of all ranks of a group, each a process with a GPU of its own, on one machine.

    UnsupportedError, on every rank alike, where one of them cannot read another's; nothing is left then.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self._own = 0  # address; 0: none
        self._opened: dict[int, int] = {}  # addresses of the others', by rank
        try:
            self.peers = self._meet()
        except BaseException:
            self._give_back()
            raise

    def close(self) -> None:
        """Give the memory back, once no rank reads it; twice is once. Nothing may use `peers` after."""
        if self._own:
            torch.cuda.synchronize(self._device)
            with suppress(GroupError):  # of a rank that is lost the memory is gone, too
                self._group.barrier()
            self._give_back()

    def _meet(self) -> Peers:
        self._library = self._agreed(_Library)
        facts = said_by_all(self._group, _facts(self._device))
        self._agreed(lambda: check_places(facts, self._group.rank))
        handles = said_by_all(self._group, self._agreed(self._allocate))
        self._agreed(lambda: self._open(handles))
        self._agreed(self._try)
        memory = {**self._opened, self._group.rank: self._own}
        return Peers(
            memory=tuple(memory[rank] for rank in range(self._group.size)),
            rank=self._group.rank,
            max_blocks=min(fact["blocks"] for fact in facts),
        )

    def _agreed(self, attempt: Callable[[], T]) -> T:
        """What the attempt returns, once it worked on every rank. UnsupportedError where it did not on one.

        What else it raises, as where nothing may be built, is raised once the others know.
        """
        results, failure = [], None
        try:
            results.append(attempt())
        except LaminaError as error:
            failure = error
        reasons = said_by_all(self._group, None if failure is None else str(failure))
        if failure is not None and not isinstance(failure, (UnsupportedError, KernelBuildError)):
            raise failure
        for rank, reason in enumerate(reasons):
            if reason is not None:
                raise UnsupportedError(f"rank {rank}: {reason}")
        return results[0]

    def _allocate(self) -> str:
        """The handle by which others open this rank's memory, which has a mark of it in the first buffer."""
        self._own, handle = self._library.allocate(memory_bytes(MAX_BYTES))
        self._library.copy(self._own + HEADER_BYTES, _mark_of(self._group.rank))
        return handle

    def _open(self, handles: Sequence[str]) -> None:
        for rank, handle in enumerate(handles):
            if rank != self._group.rank:
                self._opened[rank] = self._library.open(handle)

    def _try(self) -> None:
        """Read every other rank's mark: a driver may say that it can, and be wrong."""
        for rank, memory in self._opened.items():
            found = ctypes.create_string_buffer(MARK_BYTES)
            self._library.copy(found, memory + HEADER_BYTES)
            if found.raw != _mark_of(rank):
                raise UnsupportedError(f"what rank {rank} wrote into its memory is not what is read of it")

    def _give_back(self) -> None:
        for memory in self._opened.values():
            self._library.close(memory)
        with suppress(GroupError):  # memory that others have open must not be freed
            self._group.barrier()
            if self._own:
                self._library.free(self._own)
        self._own, self._opened = 0, {}


def check_places(facts: Sequence[Mapping[str, Any]], rank: int) -> None:
    """UnsupportedError where a rank's GPU is known to read no other's memory; facts by rank."""
    if len(facts) > MAX_RANKS:
        raise UnsupportedError(f"there are {len(facts)} ranks; wanted at most {MAX_RANKS}")
    if len({fact["machine"] for fact in facts}) > 1:
        raise UnsupportedError("ranks are on several machines")
    gpus = [fact["gpu"] for fact in facts]
    if len({*gpus}) < len(gpus):
        raise UnsupportedError(f"ranks share a GPU, of {', '.join(gpus)}")
    own = _visible_gpus()
    for other in {*gpus} & {*own} - {gpus[rank]}:
        if not torch.cuda.can_device_access_peer(own[gpus[rank]], own[other]):
            raise UnsupportedError(f"GPU {gpus[rank]} cannot reach the memory of GPU {other}")


def _facts(device: torch.device) -> dict[str, Any]:
    """Where this rank is, and how many blocks its GPU runs at once, for the others to know."""
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    return {"machine": BOOT.read_text().strip(), "gpu": gpu, "blocks": most_blocks(device)}


def _visible_gpus() -> dict[str, int]:
    """GPUs that this process sees, by id; other processes may see others."""
    numbers = range(torch.cuda.device_count())
    return {str(torch.cuda.get_device_properties(number).uuid): number for number in numbers}


def _mark_of(rank: int) -> bytes:
    return bytes([rank + 1]) * MARK_BYTES


class _Library:
    """What csrc/all_reduce has beside kernels, on the current device. Its calls raise UnsupportedError."""

    def __init__(self) -> None:
        self._calls = load_cuda_kernel("all_reduce")
        self._calls.lamina_error_string.argtypes = [ctypes.c_int]
        self._calls.lamina_error_string.restype = ctypes.c_char_p

    def allocate(self, num_bytes: int) -> tuple[int, str]:
        """The address of zeroed memory, outside all pools, and its handle."""
        memory, handle = ctypes.c_void_p(), ctypes.create_string_buffer(HANDLE_BYTES)
        self._call("allocate", ctypes.c_int64(num_bytes), ctypes.byref(memory), handle)
        return memory.value or 0, handle.raw.hex()

    def open(self, handle: str) -> int:
        """The address of another process's memory."""
        memory = ctypes.c_void_p()
        self._call("open", bytes.fromhex(handle), ctypes.byref(memory))
        return memory.value or 0

    def copy(self, to: Any, source: Any) -> None:
        """Copy a mark from or to an address; the other end is one too, or bytes of the host."""
        ends = [ctypes.c_void_p(end) if isinstance(end, int) else end for end in (to, source)]
        self._call("copy", *ends, ctypes.c_int64(MARK_BYTES))

    def close(self, memory: int) -> None:
        """Leave another process's memory."""
        self._call("close", ctypes.c_void_p(memory))

    def free(self, memory: int) -> None:
        """Give back what was allocated."""
        self._call("free", ctypes.c_void_p(memory))

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._calls, f"peer_memory_{name}")(*arguments)
        if error:
            text = self._calls.lamina_error_string(error).decode()
            raise UnsupportedError(f"memory for other ranks ({name}): {text} (CUDA error {error})")
