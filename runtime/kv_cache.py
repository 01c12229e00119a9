"""Block tables: which blocks of the KV cache hold a request's tokens. Nothing else writes them."""

from collections import Counter
from collections.abc import Mapping, Sequence

from ..common.errors import ConfigError
from .block_pool import BlockPool


class KVCacheManager:
    """Tables that grow with their requests, block by block, and are given back whole."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size is {block_size}; wanted at least 1")
        self.pool = pool
        self.block_size = block_size
        self._tables: dict[str, list[int]] = {}

    @property
    def capacity_tokens(self) -> int:
        """What the whole cache holds, if one request has it to itself."""
        return self.pool.num_usable * self.block_size

    def can_fit(self, num_tokens: int, *, spare_blocks: int = 0) -> bool:
        """Whether a new request of that length fits now and leaves that many blocks free."""
        return self._num_blocks(num_tokens) + spare_blocks <= self.pool.num_free

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Make a table long enough for that many tokens; False, and nothing done, if blocks are short."""
        missing = self._num_blocks(num_tokens) - self.num_blocks(request_id)
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            return False
        self._tables.setdefault(request_id, []).extend(self.pool.allocate(missing))
        return True

    def grow_each(self, request_ids: Sequence[str]) -> bool:
        """One more block for each of these requests; False, and nothing done, if blocks are short."""
        if len(request_ids) > self.pool.num_free:
            return False
        for request_id, block_id in zip(request_ids, self.pool.allocate(len(request_ids)), strict=True):
            self._tables[request_id].append(block_id)
        return True

    def num_blocks(self, request_id: str) -> int:
        """The length of a request's table."""
        return len(self._tables.get(request_id, ()))

    def block_ids(self, request_id: str, start: int = 0) -> tuple[int, ...]:
        """A request's table from that column on."""
        return tuple(self._tables[request_id][start:])

    def free(self, request_id: str) -> None:
        """Give back every block of a request, its last first; nothing to do for one that has none."""
        self.pool.free(reversed(self._tables.pop(request_id, ())))

    def clear(self) -> None:
        """No request has a table, and every block is free."""
        self._tables.clear()
        self.pool.clear()

    def check(self, lengths: Mapping[str, int]) -> None:
        """Exactly these requests have tables, each long enough, and the pool counts the same references."""
        self.pool.check()
        assert self._tables.keys() == lengths.keys(), f"tables {set(self._tables)}, requests {set(lengths)}"
        for request_id, num_tokens in lengths.items():
            table = self._tables[request_id]
            assert len(table) >= self._num_blocks(num_tokens), (
                f"{request_id}: {table} for {num_tokens} tokens"
            )
        counts = Counter(block_id for table in self._tables.values() for block_id in table)
        assert len(counts) == self.pool.num_used, f"{len(counts)} blocks in tables, {self.pool.num_used} used"
        for block_id, count in counts.items():
            held = self.pool.references(block_id)
            assert held == count, f"block {block_id}: {held} references, in {count} tables"

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
