"""Block tables: which blocks of the KV cache hold a request's tokens. Nothing else writes them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from ..common.errors import ConfigError
from .block_pool import NULL_BLOCK, BlockPool
from .prefix_cache import Chain, PrefixCache


class Tokens(Protocol):
    """Whatever has tokens to keep, be they a request's."""

    @property
    def request_id(self) -> str: ...
    @property
    def cache_salt(self) -> str: ...  # blocks are shared only with those of the same salt
    def token_ids(self, start: int, stop: int) -> Sequence[int]: ...


class KVCacheManager:
    """Tables that grow with their requests, block by block, and are given back whole.

    With a prefix cache, full blocks are found again by their tokens, and a table begins with those that
    hold its first tokens already. Only full blocks are shared, and nothing is written into a full block.

    Where every layer sees a `window` of tokens alone, what no layer will see again is given back sooner; in
    the table stands the null block in its place.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, *, prefix_cache: bool = False, window: int | None = None
    ) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size is {block_size}; wanted at least 1")
        self.pool = pool
        self.block_size = block_size
        self.window = window  # the most that any layer sees, the token's own position included; None: all
        self.prefix = PrefixCache(block_size) if prefix_cache else None
        self._tables: dict[str, list[int]] = {}
        self._shared: dict[str, int] = {}  # how many blocks of each table were found
        self._released: dict[str, int] = {}  # how many of its first blocks were given back
        self._chains: dict[str, Chain] = {}

    @property
    def capacity_tokens(self) -> int:
        """What the whole cache holds, if one request has it to itself."""
        return self.pool.num_usable * self.block_size

    def admit(
        self, tokens: Tokens, num_tokens: int, *, num_reusable: int = 0, spare_blocks: int = 0
    ) -> int | None:
        """Make a table for so many tokens; returns how many of them are in the cache already.

        None, and nothing done, where it would not leave `spare_blocks` that nobody holds. Of the first
        `num_reusable` tokens the keys and values are all that is wanted, so they may be found.
        """
        found = self._find(tokens, num_reusable)
        idle = sum(self.pool.references(block_id) == 0 for block_id in found)
        missing = self._num_blocks(num_tokens) - len(found)
        if missing + idle + spare_blocks > self.pool.num_available:
            return None
        assert tokens.request_id not in self._tables, f"{tokens.request_id} has a table"
        self.pool.share(found)  # before any is dropped to make room
        self._tables[tokens.request_id] = found + self._allocate(missing)
        self._shared[tokens.request_id] = len(found)
        self._released[tokens.request_id] = 0
        return len(found) * self.block_size

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Make a table long enough for that many tokens; False, and nothing done, if blocks are short."""
        missing = self._num_blocks(num_tokens) - self.num_blocks(request_id)
        if missing <= 0:
            return True
        if missing > self.pool.num_available:
            return False
        self._tables[request_id].extend(self._allocate(missing))
        return True

    def grow_each(self, request_ids: Sequence[str]) -> bool:
        """One more block for each of these requests; False, and nothing done, if blocks are short."""
        if len(request_ids) > self.pool.num_available:
            return False
        for request_id, block_id in zip(request_ids, self._allocate(len(request_ids)), strict=True):
            self._tables[request_id].append(block_id)
        return True

    def commit(self, tokens: Tokens, num_tokens: int, step: int) -> None:
        """Let the full blocks of a request's first tokens be found: they are written by this step at last."""
        table = self._tables.get(tokens.request_id)
        if self.prefix is not None and table:
            full = table[: num_tokens // self.block_size]
            self.pool.keep(self.prefix.commit(self._chain(tokens), full, step))

    def release(self, tokens: Tokens, num_computed: int, step: int) -> None:
        """Give back the blocks out of every window once so many tokens are computed, by steps that are over.

        What they hold is kept, as when a table is freed, so that it can still be found.
        """
        if self.window is None:
            return
        first, last = self._released[tokens.request_id], max(0, num_computed - self.window + 1)
        last //= self.block_size
        if last > first:
            self.commit(tokens, last * self.block_size, step)
            table = self._tables[tokens.request_id]
            self.pool.free(table[first:last])
            table[first:last] = [NULL_BLOCK] * (last - first)
            self._released[tokens.request_id] = last

    def uncommit(self, step: int) -> list[str]:
        """That step and later ones never were: forget what they wrote; returns who had found some of it."""
        if self.prefix is None:
            return []
        dropped = self.prefix.drop_since(step)
        self.pool.drop(dropped)
        return [name for name, shared in self._shared.items() if dropped & {*self._tables[name][:shared]}]

    def num_blocks(self, request_id: str) -> int:
        """The length of a request's table."""
        return len(self._tables.get(request_id, ()))

    def block_ids(self, request_id: str, start: int = 0) -> tuple[int, ...]:
        """A request's table from that column on."""
        return tuple(self._tables[request_id][start:])

    def free(self, request_id: str) -> None:
        """Give back every block of a request, its last first; nothing to do for one that has none."""
        table, released = self._tables.pop(request_id, ()), self._released.pop(request_id, 0)
        self.pool.free(reversed(table[released:]))
        self._shared.pop(request_id, None)
        self._chains.pop(request_id, None)

    def clear(self) -> None:
        """No request has a table, every block is free, and nothing is known of what they hold."""
        for book in (self._tables, self._shared, self._released, self._chains):
            book.clear()
        self.pool.clear()
        if self.prefix is not None:
            self.prefix.clear()

    def check(self, lengths: Mapping[str, int]) -> None:
        """Exactly these requests have tables, each long enough, and the pool counts the same references."""
        self.pool.check()
        assert self._tables.keys() == lengths.keys(), f"tables {set(self._tables)}, requests {set(lengths)}"
        for request_id, num_tokens in lengths.items():
            table = self._tables[request_id]
            assert len(table) >= self._num_blocks(num_tokens), (
                f"{request_id}: {table} for {num_tokens} tokens"
            )
            released = self._released[request_id]
            assert table[:released] == [NULL_BLOCK] * released, f"{request_id}: {table}, {released} released"
            assert NULL_BLOCK not in table[released:], f"{request_id}: {table}, {released} released"
            assert released * self.block_size <= max(0, num_tokens - (self.window or num_tokens) + 1)
        counts = Counter(block_id for table in self._tables.values() for block_id in table)
        counts.pop(NULL_BLOCK, None)
        assert len(counts) == self.pool.num_used, f"{len(counts)} blocks in tables, {self.pool.num_used} used"
        for block_id, count in counts.items():
            held = self.pool.references(block_id)
            assert held == count, f"block {block_id}: {held} references, in {count} tables"
        self._check_sharing(counts)

    def _check_sharing(self, counts: Mapping[int, int]) -> None:
        """A block has one owner, and whoever else has it found it; what is to be kept can be found."""
        begins = {name: max(shared, self._released[name]) for name, shared in self._shared.items()}
        owned = [block for name, table in self._tables.items() for block in table[begins[name] :]]
        assert len(owned) == len(set(owned)), "a block has two owners"
        known = set() if self.prefix is None else {*self.prefix.block_ids()}
        for block_id in range(self.pool.num_blocks):
            assert self.pool.is_kept(block_id) == (block_id in known), f"block {block_id} is kept or known"
        for name, shared in self._shared.items():
            if self._released[name] == 0:  # else what came before may have been forgotten since
                found = self._tables[name][:shared]
                assert known.issuperset(found), f"{name} has found a block that is unknown"
        if self.prefix is not None:
            self.prefix.check()

    def _find(self, tokens: Tokens, num_reusable: int) -> list[int]:
        if self.prefix is None or num_reusable < self.block_size:
            return []
        chain = self._chain(tokens)
        chain.entries = self.prefix.match(chain, num_reusable // self.block_size)
        return [entry.block_id for entry in chain.entries]

    def _chain(self, tokens: Tokens) -> Chain:
        """A request's hashes, kept from the first time that it waits until its blocks are given back."""
        chain = self._chains.get(tokens.request_id)
        if chain is None:
            chain = self._chains[tokens.request_id] = Chain(tokens.cache_salt, tokens.token_ids)
        return chain

    def _allocate(self, count: int) -> list[int]:
        """Free blocks; where they are short, the least recently used of the cached ones are free first."""
        while self.pool.num_free < count:
            assert self.prefix is not None, "only a prefix cache keeps blocks"
            self.pool.drop(self.prefix.drop(self.pool.least_recently_used))
        return self.pool.allocate(count)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
