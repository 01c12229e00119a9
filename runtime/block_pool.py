"""The fixed set of KV-cache blocks: who holds each, and which is handed out next."""

from collections import deque
from collections.abc import Iterable

from ..common.errors import ConfigError, OutOfBlocksError

NULL_BLOCK = 0  # stands in padding of block tables; never handed out, never written


class BlockPool:
    """Blocks 1 to num_blocks - 1, handed out least recently freed first and counted by reference."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"num_blocks is {num_blocks}; wanted at least 2, as block {NULL_BLOCK} is reserved"
            )
        self.num_blocks = num_blocks
        self.clear()

    def clear(self) -> None:
        """Every block is free, whoever held it."""
        self._free = deque(range(NULL_BLOCK + 1, self.num_blocks))
        self._references = [0] * self.num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out at all: free and used ones together."""
        return self.num_blocks - 1

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    def allocate(self, count: int) -> list[int]:
        """That many blocks with one reference each, or OutOfBlocksError and nothing changed."""
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} KV blocks wanted, {self.num_free} of {self.num_usable} are free")
        block_ids = [self._free.popleft() for _ in range(count)]
        for block_id in block_ids:
            self._references[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each of these blocks, which someone holds already."""
        for block_id in block_ids:
            assert self._references[block_id] > 0, f"block {block_id} is shared but nobody holds it"
            self._references[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Give back one reference to each; a block without any is free, in the order given here."""
        for block_id in block_ids:
            assert self._references[block_id] > 0, f"block {block_id} is freed but nobody holds it"
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._free.append(block_id)

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def check(self) -> None:
        """Every block is either free or referenced, once, and the null block is neither."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert NULL_BLOCK not in free, "the null block is on the free list"
        assert self._references[NULL_BLOCK] == 0, "the null block was handed out"
        for block_id in range(NULL_BLOCK + 1, self.num_blocks):
            count = self._references[block_id]
            assert (count == 0) == (block_id in free), (
                f"block {block_id}: {count} references, free {block_id in free}"
            )
