"""The fixed set of KV-cache blocks: who holds each, which are worth keeping, and which is handed out next."""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable

from ...common.errors import ConfigError, OutOfBlocksError
from ..protocol.scheduler_output import NULL_BLOCK


class BlockPool:
    """Blocks 1 to num_blocks - 1, each of them free, used or cached.

    Used blocks are counted by reference. One without any is free, or, if its contents are to be kept, cached:
    it can be used again as it is, until it is dropped. Free ones are handed out least recently freed first.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"num_blocks is {num_blocks}; wanted at least 2, as block {NULL_BLOCK} is reserved"
            )
        self.num_blocks = num_blocks
        self.clear()

    def clear(self) -> None:
        """Every block is free, whoever held it and whatever was to be kept."""
        self._free = deque(range(NULL_BLOCK + 1, self.num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._kept: set[int] = set()
        self._references = [0] * self.num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that nobody holds: free ones, and cached ones, which can be dropped."""
        return len(self._free) + len(self._cached)

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out at all: free, cached and used ones together."""
        return self.num_blocks - 1

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_available

    @property
    def least_recently_used(self) -> int:
        """The cached block to drop first; there must be one."""
        return next(iter(self._cached))

    def allocate(self, count: int) -> list[int]:
        """That many free blocks with one reference each, or OutOfBlocksError and nothing changed."""
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} KV blocks wanted, {self.num_free} of {self.num_usable} are free")
        block_ids = [self._free.popleft() for _ in range(count)]
        for block_id in block_ids:
            self._references[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each of these blocks, which someone holds already or which are cached."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                assert block_id in self._cached, f"block {block_id} is shared but nobody holds it"
                del self._cached[block_id]
            self._references[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Give back one reference to each; a block without any is free or cached, in the order given here."""
        references, kept = self._references, self._kept
        for block_id in block_ids:
            count = references[block_id] - 1
            assert count >= 0, f"block {block_id} is freed but nobody holds it"
            references[block_id] = count
            if count == 0:
                if block_id in kept:
                    self._cached[block_id] = None
                else:
                    self._free.append(block_id)

    def keep(self, block_ids: Collection[int]) -> None:
        """What these blocks hold, which are in use, is to be kept when nobody holds them any more."""
        held = all(map(self._references.__getitem__, block_ids))
        assert held, f"one of the blocks {[*block_ids]} is to be kept but nobody holds it"
        self._kept.update(block_ids)

    def drop(self, block_ids: Iterable[int]) -> None:
        """What these kept blocks hold is not worth keeping: those that nobody uses are free now."""
        for block_id in block_ids:
            self._kept.remove(block_id)
            if self._references[block_id] == 0:
                del self._cached[block_id]
                self._free.append(block_id)

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def is_kept(self, block_id: int) -> bool:
        return block_id in self._kept

    def check(self) -> None:
        """Every block is free, cached or referenced, one of them, and the null block is none of them."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & self._kept, "a block that is to be kept is free"
        assert self._cached.keys() <= self._kept, "a block is cached that is not to be kept"
        assert NULL_BLOCK not in free | self._kept, "the null block is on the free list or kept"
        assert self._references[NULL_BLOCK] == 0, "the null block was handed out"
        for block_id in range(NULL_BLOCK + 1, self.num_blocks):
            count, places = self._references[block_id], (block_id in free) + (block_id in self._cached)
            assert places == (count == 0), f"block {block_id}: {count} references, on {places} lists"
