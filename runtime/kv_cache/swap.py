"""Which blocks of preempted requests are swapped out when the cache needs them: decisions, no bytes."""

from collections.abc import Callable, Container, Iterable, Sequence

from ..protocol.scheduler_output import Copies
from .prefix_cache import CachedBlock

NOT_LAUNCHED = 0  # the step of a copy that no step has begun with so far


class SwapSpace:
    """Slots of host memory for cached blocks that preempted requests will want again, and for no others.

    A request that waits to be admitted again wants the blocks that it held, in order, each of them the very
    block that was verified when it was committed or hit. While they stay cached nothing is copied. One that
    is evicted is swapped out to a slot, and in to another block when its request is admitted. Where slots are
    short, the last of a request's blocks gives way to one before it, as without that one it is of no use.

    The step launched next begins with the copies: first all that go out, which are read before anything is
    written over them, then all that come in. So a slot that is read can be filled by a later step at the
    earliest.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_out = 0  # blocks that were swapped out so far
        self.num_in = 0  # and in
        self.clear()

    def clear(self) -> None:
        """Nobody wants anything, and every slot is free."""
        self._free = list(range(self.num_slots))[::-1]  # the lowest last
        self._wanted: dict[str, list[CachedBlock]] = {}  # by each request that waits, from its first token on
        self._wanting: dict[CachedBlock, dict[str, None]] = {}  # the same, by block
        self._cached: dict[int, CachedBlock] = {}  # of these blocks, those that are still in the cache
        self._slots: dict[CachedBlock, int] = {}  # and those that are in a slot
        self._filled_by = [NOT_LAUNCHED] * self.num_slots  # the step that fills each
        self._swap_out: dict[int, int] = {}  # slot: block, of copies to be launched
        self._swap_in: list[tuple[int, int]] = []  # slot, block
        self._being_read: set[int] = set()  # slots that the next step reads
        self._read_last: list[int] = []  # of them, those that are free when that step is launched

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def want(self, request_id: str, entries: Sequence[CachedBlock]) -> None:
        """A request that has given back these blocks, which are cached, waits to be admitted again."""
        assert request_id not in self._wanted, f"{request_id} waits already"
        if entries:
            self._wanted[request_id] = [*entries]
        for entry in entries:
            self._wanting.setdefault(entry, {})[request_id] = None
            self._cached[entry.block_id] = entry

    def discard(self, request_id: str) -> None:
        """A request does not wait any more; what it alone wanted is not kept."""
        self._cut(request_id, 0)

    def evict(self, block_ids: Iterable[int]) -> None:
        """The cache has evicted these blocks to use them for something else, parents before children."""
        for block_id in block_ids:
            entry = self._cached.pop(block_id, None)
            if entry is None:
                continue
            if not self._free:
                self._make_room(entry)
            if self._free:
                slot = self._slots[entry] = self._free.pop()
                self._filled_by[slot] = NOT_LAUNCHED
                self._swap_out[slot] = block_id
            else:
                self._lose(entry)

    def lose(self, block_ids: Iterable[int]) -> None:
        """These blocks do not hold what they were to hold."""
        for block_id in block_ids:
            entry = self._cached.pop(block_id, None)
            if entry is not None:
                self._lose(entry)

    def take(self, request_id: str, columns: slice) -> list[int]:
        """The request is admitted: the slots that hold its blocks of these columns, as far as they all do."""
        entries = self._wanted.get(request_id, ())
        slots: list[int] = []
        for entry in entries[columns]:
            slot = self._slots.get(entry)
            if slot is None:
                break
            slots.append(slot)
        self._being_read.update(slots)  # so that none is filled with anything else in this step
        self.discard(request_id)
        return slots

    def swap_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """What was taken is copied into these blocks."""
        self._swap_in += zip(slots, block_ids, strict=True)

    @property
    def has_copies(self) -> bool:
        """Whether the next step has anything to copy."""
        return bool(self._swap_out or self._swap_in)

    def launch(self, step: int) -> Copies:
        """The copies that this step begins with, taken as launched from now on."""
        swap_out = tuple((block_id, slot) for slot, block_id in self._swap_out.items())
        swap_in = tuple(self._swap_in)
        for slot in self._swap_out:
            self._filled_by[slot] = step
        self._free += self._read_last
        self._swap_out.clear()
        self._swap_in.clear()
        self._read_last.clear()
        self._being_read.clear()
        self.num_out += len(swap_out)
        self.num_in += len(swap_in)
        return Copies(swap_out, swap_in)

    def undo(self, step: int) -> None:
        """That step and later ones never were: what they were to copy is not there."""
        for entry in [entry for entry, slot in self._slots.items() if self._filled_by[slot] >= step]:
            if entry in self._slots:
                self._lose(entry)

    def check(self, waiting: Container[str], entry_of: Callable[[int], CachedBlock | None]) -> None:
        """Each slot is free or has an owner that someone wants, who waits; for tests, between calls."""
        used = [*self._slots.values(), *self._read_last]
        assert len(used) == len(set(used)), "a slot has two owners"
        assert sorted(used + self._free) == list(range(self.num_slots)), "a slot was lost or is free twice"
        assert {*self._read_last} <= self._being_read, "a slot is kept for no reader"
        assert not {*self._free} & self._being_read, "a slot that is to be read is free"
        assert self._swap_out.keys() <= {*used}, "a copy goes to a slot that nobody owns"
        for name, entries in self._wanted.items():
            assert name in waiting, f"{name} does not wait"
            assert all(name in self._wanting[entry] for entry in entries), f"{name} wants more than it may"
            places = [entry in self._slots for entry in entries]
            assert places == sorted(places), f"{name}: a block in the cache comes after one that is not"
        assert sum(map(len, self._wanting.values())) == sum(map(len, self._wanted.values()))
        assert {*self._cached.values()} | self._slots.keys() == self._wanting.keys(), "what is wanted is lost"
        assert not {*self._cached.values()} & self._slots.keys(), "a block is in two places"
        for block_id, entry in self._cached.items():
            assert entry_of(block_id) is entry, f"block {block_id} is not what somebody wants"

    def _make_room(self, entry: CachedBlock) -> None:
        """Free the slot of the last block of somebody who wants this one."""
        for name in self._wanting[entry]:
            last = self._wanted[name][-1]
            if last in self._slots:
                self._lose(last)
                return

    def _lose(self, entry: CachedBlock) -> None:
        """Whoever wants a block will compute it again, and all of its own that come after it."""
        for name in [*self._wanting[entry]]:
            self._cut(name, self._wanted[name].index(entry))

    def _cut(self, request_id: str, num_kept: int) -> None:
        """A request wants its first blocks alone."""
        entries = self._wanted.get(request_id, [])
        for entry in entries[num_kept:]:
            wanting = self._wanting[entry]
            del wanting[request_id]
            if not wanting:
                del self._wanting[entry]
                self._free_place(entry)
        del entries[num_kept:]
        if not entries:
            self._wanted.pop(request_id, None)

    def _free_place(self, entry: CachedBlock) -> None:
        slot = self._slots.pop(entry, None)
        if slot is None:
            if self._cached.get(entry.block_id) is entry:
                del self._cached[entry.block_id]
        elif slot in self._being_read:
            self._read_last.append(slot)
        else:
            self._swap_out.pop(slot, None)
            self._free.append(slot)
