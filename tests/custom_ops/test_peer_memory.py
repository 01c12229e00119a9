"""Memory that ranks read of each other: all have it or none, and nothing of it is left; the host's, here."""

import ctypes
from typing import Any, ClassVar

import pytest
import torch

from lamina.common.errors import KernelBuildError, LaminaError, NotWarmError, UnsupportedError
from lamina.custom_ops.all_reduce import peer_memory
from lamina.custom_ops.all_reduce.group import Group, current_group
from lamina.custom_ops.all_reduce.peer_memory import MARK_BYTES, PeerMemory, check_places

from ..ranks import as_threads

CPU = torch.device("cpu")


class HostMemory:
    """What csrc/all_reduce has beside kernels, of ranks that are threads; rank 1 fails where it is to."""

    held: ClassVar[set[tuple[int, int]]] = set()  # rank and address, of what is allocated or open
    fault = ""

    def __init__(self) -> None:
        self.rank = current_group().rank
        self._fail("build", KernelBuildError)
        self._fail("build what must be there", NotWarmError)

    def _fail(self, what: str, error: type[LaminaError] = UnsupportedError) -> None:
        if self.rank == 1 and self.fault == what:
            raise error(f"cannot {what}")

    def allocate(self, num_bytes: int) -> tuple[int, str]:
        self._fail("allocate")
        self._buffer = ctypes.create_string_buffer(num_bytes)
        address = ctypes.addressof(self._buffer)
        self.held.add((self.rank, address))
        return address, hex(address)

    def open(self, handle: str) -> int:
        self._fail("open")
        self.held.add((self.rank, int(handle, 16)))
        return int(handle, 16)

    def copy(self, to: Any, source: Any) -> None:
        reads_wrongly = self.rank == 1 and self.fault == "read" and isinstance(source, int)
        ctypes.memmove(to, bytes(MARK_BYTES) if reads_wrongly else source, MARK_BYTES)

    def close(self, memory: int) -> None:
        self.held.remove((self.rank, memory))

    free = close


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(device: torch.device) -> dict[str, Any]:
        rank = current_group().rank
        return {"machine": "here", "gpu": f"GPU {rank}", "blocks": 100 - rank}

    monkeypatch.setattr(HostMemory, "held", set())
    monkeypatch.setattr(peer_memory, "_Library", HostMemory)
    monkeypatch.setattr(peer_memory, "_facts", facts)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def test_every_rank_reaches_the_memory_of_all_until_it_is_closed() -> None:
    def work(group: Group) -> tuple[int, ...]:
        memory = PeerMemory(group, CPU)
        assert (memory.peers.rank, memory.peers.size, memory.peers.max_blocks) == (group.rank, 3, 98)
        group.barrier()
        assert len(HostMemory.held) == 9
        group.barrier()
        memory.close()
        memory.close()
        return memory.peers.memory

    first, *others = as_threads(3, work)
    assert len({*first}) == 3
    assert others == [first] * 2
    assert not HostMemory.held


@pytest.mark.parametrize("fault", ["build", "allocate", "open"])
def test_what_one_rank_cannot_have_none_has(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "fault", fault)

    def work(group: Group) -> None:
        with pytest.raises(UnsupportedError, match=f"rank 1: cannot {fault}"):
            PeerMemory(group, CPU)

    as_threads(3, work)
    assert not HostMemory.held


def test_memory_that_is_not_what_another_rank_wrote_is_not_relied_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "fault", "read")

    def work(group: Group) -> None:
        with pytest.raises(UnsupportedError, match="rank 1: what rank 0 wrote into its memory is not what"):
            PeerMemory(group, CPU)

    as_threads(3, work)
    assert not HostMemory.held


def test_a_rank_that_may_build_nothing_says_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "fault", "build what must be there")

    def work(group: Group) -> None:
        with pytest.raises(NotWarmError if group.rank == 1 else UnsupportedError, match="must be there"):
            PeerMemory(group, CPU)

    as_threads(3, work)


def test_ranks_whose_gpus_cannot_reach_each_other_say_which() -> None:
    one, two, far = (
        {"machine": machine, "gpu": gpu} for machine, gpu in (("a", "x"), ("a", "y"), ("b", "z"))
    )
    check_places([one, two], 0)
    with pytest.raises(UnsupportedError, match="ranks are on several machines"):
        check_places([one, two, far], 0)
    with pytest.raises(UnsupportedError, match="ranks share a GPU, of x, y, x"):
        check_places([one, two, one], 0)
    with pytest.raises(UnsupportedError, match="there are 9 ranks; wanted at most 8"):
        check_places([{**one, "gpu": str(number)} for number in range(9)], 0)
