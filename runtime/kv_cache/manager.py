"""The block tables of each KV-cache group: which blocks hold a request's tokens. Nothing else writes them."""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...common.errors import ConfigError
from ..protocol.scheduler_output import NO_COPIES, NULL_BLOCK, Copies, Ints
from .block_pool import BlockPool
from .prefix_cache import CachedBlock, Chain, PrefixCache
from .swap import SwapSpace


class Tokens(Protocol):
    """Whatever has tokens to keep, be they a request's."""

    @property
    def request_id(self) -> str: ...
    @property
    def cache_salt(self) -> str: ...  # blocks are shared only with those of the same salt
    def token_bytes(self, start: int, stop: int) -> bytes: ...  # of int32


@dataclass(slots=True)
class Table:
    """A request's blocks: for each KV-cache group one for every `block_size` tokens."""

    groups: list[list[int]]  # equally long
    num_shared: int  # columns that were prefix-cache hits
    released: list[int]  # of each group, how many of its first blocks were given back, or never held
    restored_by: int = 0  # the step that copies blocks from the host into it; 0: none

    @property
    def num_columns(self) -> int:
        return len(self.groups[0])

    def held(self) -> list[int]:
        """Every block that it holds, column by column."""
        columns = zip(*self.groups, strict=True)
        return [block_id for column in columns for block_id in column if block_id != NULL_BLOCK]

    def extend(self, block_ids: Sequence[int]) -> None:
        """Columns for so many blocks, which come column by column."""
        for which, group in enumerate(self.groups):
            group += block_ids[which :: len(self.groups)]


class KVCacheManager:
    """Tables that grow with their requests, block by block, and are given back whole.

    With a prefix cache, full blocks that are committed are hits for whoever has the same first tokens, and
    his table begins with them. Only full blocks are shared, and nothing is written into a full block.

    Layers that see all before them and layers that see a window are in different KV-cache groups. A block
    holds the keys and values of one group's layers, so every group has a table of its own, of blocks from one
    pool. What no layer of a group will see again is given back; in its table the null block stands in for it.
    A prefix is a hit as far as the first group holds all of it and every other one what it would still see.

    With slots to swap to, what a suspended request held goes to the host when its place in the cache is
    needed, and comes back when the request is admitted again.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        prefix_cache: bool = False,
        windows: Sequence[int | None] = (None,),
        swap_slots: int = 0,
    ) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size is {block_size}; wanted at least 1")
        if not windows or (len(windows) > 1 and windows[0] is not None):
            raise ConfigError(f"windows is {windows}; wanted one a group, None first where there are several")
        if swap_slots and not (prefix_cache and tuple(windows) == (None,)):
            raise ConfigError(f"swap_slots is {swap_slots}; wanted 0 without a prefix cache or with windows")
        self.pool = pool
        self.block_size = block_size
        # Of each KV-cache group the most that its layers see, the token's own position included; None: all.
        self.windows = tuple(windows)
        self.has_windows = self.windows != (None,) * len(self.windows)
        self.prefix = PrefixCache(block_size, len(windows)) if prefix_cache else None
        self.swap = SwapSpace(swap_slots) if swap_slots else None
        self._tables: dict[str, Table] = {}
        self._chains: dict[str, Chain] = {}

    @property
    def num_groups(self) -> int:
        """KV-cache groups: layers that share block tables."""
        return len(self.windows)

    @property
    def capacity_tokens(self) -> int:
        """What the whole cache holds, if one request has it to itself."""
        return self.pool.num_usable // self.num_groups * self.block_size

    def admit(
        self,
        tokens: Tokens,
        num_tokens: int,
        *,
        num_reusable: int = 0,
        spare_blocks: int = 0,
        step: int = 0,
    ) -> int | None:
        """Make a table for so many tokens; returns how many of them need not be computed.

        None, and nothing done, where it would not leave `spare_blocks` of each group that nobody holds. Of
        the first `num_reusable` tokens the keys and values are all that is wanted, so they may be hits: in
        the prefix cache, and after that on the host, from where this step swaps them in.
        """
        table = self._hits(tokens, num_reusable)
        held = table.held()
        idle = sum(self.pool.references(block_id) == 0 for block_id in held)
        missing = self.blocks_for(num_tokens) - table.num_columns
        if (missing + spare_blocks) * self.num_groups + idle > self.pool.num_available:
            return None
        assert tokens.request_id not in self._tables, f"{tokens.request_id} has a table"
        self.pool.share(held)  # before any is dropped to make room
        self._tables[tokens.request_id] = table
        reusable, slots = slice(table.num_shared, num_reusable // self.block_size), []
        if self.swap is not None:  # before others need them for what is to make room
            slots = self.swap.take(tokens.request_id, reusable)
        table.extend(self._take_free(missing * self.num_groups))
        if self.swap is not None and slots:
            self.swap.swap_in(slots, table.groups[0][table.num_shared :][: len(slots)])
            table.restored_by = step
        return (table.num_shared + len(slots)) * self.block_size

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Make a table long enough for that many tokens; False, and nothing done, if blocks are short."""
        missing = (self.blocks_for(num_tokens) - self.num_blocks(request_id)) * self.num_groups
        if missing > self.pool.num_available:
            return False
        if missing > 0:
            self._tables[request_id].extend(self._take_free(missing))
        return True

    def grow_each(self, request_ids: Sequence[str]) -> list[int] | None:
        """One more column for each of these requests; returns their blocks, column after column.

        None, and nothing done, if blocks are short.
        """
        num_groups, tables = self.num_groups, self._tables
        if len(request_ids) * num_groups > self.pool.num_available:
            return None
        block_ids = self._take_free(len(request_ids) * num_groups)
        for group in range(num_groups):
            for request_id, block_id in zip(request_ids, block_ids[group::num_groups], strict=True):
                tables[request_id].groups[group].append(block_id)
        return block_ids

    def commit(self, tokens: Tokens, num_tokens: int, step: int) -> None:
        """Commit the full blocks of a request's first tokens, which this step writes last."""
        table = self._tables.get(tokens.request_id)
        if self.prefix is not None and table is not None:
            full = [group[: num_tokens // self.block_size] for group in table.groups]
            self.pool.keep(self.prefix.commit(self._chain(tokens), full[0], step, full[1:]))

    def release(self, tokens: Tokens, num_computed: int, step: int) -> None:
        """Give back the blocks out of every window once so many tokens are computed, by steps that are over.

        They stay committed, as when a table is freed, so that they can still be hits.
        """
        table = self._tables[tokens.request_id]
        unseen = [self._first_seen(window, num_computed) for window in self.windows]
        if any(last > first for first, last in zip(table.released, unseen, strict=True)):
            self.commit(tokens, max(unseen) * self.block_size, step)
        for which, (first, last) in enumerate(zip(table.released, unseen, strict=True)):
            if last > first:
                self.pool.free(table.groups[which][first:last])
                table.groups[which][first:last] = [NULL_BLOCK] * (last - first)
                table.released[which] = last

    def rows_past_a_window(self, before: Ints, computed: Ints) -> Ints:
        """Which requests of so many tokens computed before, and more now, have blocks that left a window."""
        past = np.zeros(len(computed), bool)
        for window in {*self.windows} - {None}:
            assert window is not None
            unseen, unseen_before = ((n - window + 1).clip(0) // self.block_size for n in (computed, before))
            past |= unseen > unseen_before
        return past.nonzero()[0]

    def uncommit(self, step: int) -> list[str]:
        """That step and later ones never were: evict what they wrote; returns whose hits some of it was."""
        if self.prefix is None:
            return []
        evicted = self.prefix.evict_since(step)
        self.pool.drop(evicted)
        if self.swap is not None:
            self.swap.lose(evicted)
            self.swap.undo(step)
        return [
            name
            for name, table in self._tables.items()
            if table.restored_by >= step
            or any(evicted & {*group[: table.num_shared]} for group in table.groups)
        ]

    def copies(self, step: int) -> Copies:
        """What this step, which is launched now, copies between the cache and the host."""
        if self.swap is None or not self.swap.has_copies:
            return NO_COPIES
        return self.swap.launch(step)

    def num_blocks(self, request_id: str) -> int:
        """The length of a request's table, of every group alike."""
        table = self._tables.get(request_id)
        return 0 if table is None else table.num_columns

    def blocks_for(self, num_tokens: int) -> int:
        """How long a table is that has room for so many tokens."""
        return -(-num_tokens // self.block_size)

    def block_ids(self, request_id: str, start: int = 0, group: int = 0) -> tuple[int, ...]:
        """A request's table of a group from that column on."""
        return tuple(self._tables[request_id].groups[group][start:])

    def tables(self, request_id: str) -> Sequence[Sequence[int]]:
        """A request's tables, one a group; they are not to be written, and change when it grows."""
        return self._tables[request_id].groups

    def free(self, request_id: str) -> None:
        """Give back every block of a request, its last first; nothing to do for one that has none."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self.pool.free(reversed(table.held()))
        self._chains.pop(request_id, None)
        if self.swap is not None:
            self.swap.discard(request_id)

    def suspend(self, request_id: str) -> None:
        """The same for one that is to be admitted again: what it held is worth a place on the host."""
        chain = self._chains.get(request_id)
        self.free(request_id)
        if self.swap is not None and chain is not None:
            self.swap.want(request_id, chain.entries)

    def clear(self) -> None:
        """No request has a table, every block is free, and none is committed."""
        self._tables.clear()
        self._chains.clear()
        self.pool.clear()
        if self.prefix is not None:
            self.prefix.clear()
        if self.swap is not None:
            self.swap.clear()

    def check(self, lengths: Mapping[str, int], waiting: Container[str] = ()) -> None:
        """Exactly these requests have tables, each long enough, and the pool counts the same references.

        Only those that wait want anything kept on the host.
        """
        self.pool.check()
        assert self._tables.keys() == lengths.keys(), f"tables {set(self._tables)}, requests {set(lengths)}"
        for request_id, num_tokens in lengths.items():
            self._check_table(request_id, num_tokens)
        counts = Counter(block_id for table in self._tables.values() for block_id in table.held())
        assert len(counts) == self.pool.num_used, f"{len(counts)} blocks in tables, {self.pool.num_used} used"
        for block_id, count in counts.items():
            held = self.pool.references(block_id)
            assert held == count, f"block {block_id}: {held} references, in {count} tables"
        self._check_sharing()
        if self.swap is not None and self.prefix is not None:
            self.swap.check(waiting, self.prefix.entry_of)

    def _check_table(self, request_id: str, num_tokens: int) -> None:
        """A table is long enough, and has given back what it says, which none of its layers will see."""
        table = self._tables[request_id]
        assert table.num_columns >= self.blocks_for(num_tokens), f"{request_id}: {table}, {num_tokens} tokens"
        for window, blocks, released in zip(self.windows, table.groups, table.released, strict=True):
            assert len(blocks) == table.num_columns, f"{request_id}: {table}"
            assert blocks[:released] == [NULL_BLOCK] * released, f"{request_id}: {table}"
            assert NULL_BLOCK not in blocks[released:], f"{request_id}: {table}"
            seen = max(num_tokens, table.num_shared * self.block_size)
            assert released <= self._first_seen(window, seen), f"{request_id}: {table}, {num_tokens} tokens"

    def _check_sharing(self) -> None:
        """A block has one owner, and for whoever else has it it was a hit; what is kept is committed."""
        owned = [
            block
            for table in self._tables.values()
            for group, released in zip(table.groups, table.released, strict=True)
            for block in group[max(table.num_shared, released) :]
        ]
        assert len(owned) == len(set(owned)), "a block has two owners"
        committed = set() if self.prefix is None else {*self.prefix.block_ids()}
        for block_id in range(self.pool.num_blocks):
            assert self.pool.is_kept(block_id) == (block_id in committed), f"block {block_id}: kept?"
        for name, table in self._tables.items():
            if table.released[0] == 0:  # else what came before may have been evicted since
                hits = table.groups[0][: table.num_shared]
                assert committed.issuperset(hits), f"{name} has hit a block that is not committed"
        if self.prefix is not None:
            self.prefix.check()

    def _hits(self, tokens: Tokens, num_reusable: int) -> Table:
        """A table of what is in the prefix cache already."""
        entries: list[CachedBlock] = []
        if self.prefix is not None and num_reusable >= self.block_size:
            chain = self._chain(tokens)
            entries = self.prefix.match(chain, num_reusable // self.block_size)
            entries = entries[: self._usable(entries)]
            chain.entries = entries[:]
        columns = len(entries)
        unseen = [self._first_seen(window, columns * self.block_size) for window in self.windows[1:]]
        groups = [[entry.block_id for entry in entries]]
        for which, first in enumerate(unseen):
            groups.append([NULL_BLOCK] * first + [entry.further[which] for entry in entries[first:]])
        return Table(groups, columns, [0, *unseen])

    def _usable(self, entries: Sequence[CachedBlock]) -> int:
        """How many of these columns a request can begin with: every group holds what its layers would see."""
        most, windows = len(entries) if self.num_groups == 1 else 0, self.windows[1:]
        runs = [0] * len(windows)  # of blocks that are there, up to this column
        for column, entry in enumerate(entries if windows else (), start=1):
            runs = [
                run + 1 if block != NULL_BLOCK else 0 for run, block in zip(runs, entry.further, strict=True)
            ]
            unseen = [self._first_seen(window, column * self.block_size) for window in windows]
            if all(run >= column - first for run, first in zip(runs, unseen, strict=True)):
                most = column
        return most

    def _first_seen(self, window: int | None, num_computed: int) -> int:
        """The first column that the next token, and any after it, sees through a window."""
        return 0 if window is None else max(0, num_computed - window + 1) // self.block_size

    def _chain(self, tokens: Tokens) -> Chain:
        """A request's hashes, kept from the first time that it waits until its blocks are given back."""
        chain = self._chains.get(tokens.request_id)
        if chain is None:
            chain = self._chains[tokens.request_id] = Chain(tokens.cache_salt, tokens.token_bytes)
        return chain

    def _take_free(self, count: int) -> list[int]:
        """So many free blocks; where they are short, the least recently used cached ones are evicted."""
        while self.pool.num_free < count:
            assert self.prefix is not None, "only a prefix cache keeps blocks"
            evicted = self.prefix.evict(self.pool.least_recently_used)
            self.pool.drop(evicted)
            if self.swap is not None:
                self.swap.evict(evicted)
        return self.pool.allocate(count)
