"""The prefix cache: which full blocks hold which tokens, looked up by hash and compared by their tokens."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import xxhash

from ..protocol.scheduler_output import NULL_BLOCK


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A committed block: full, of known tokens, after known ones.

    It is of the first KV-cache group. Blocks of the further groups with the same tokens hang on it, each of
    which may be evicted alone.
    """

    block_id: int
    digest: bytes
    token_ids: bytes  # int32
    parent: "CachedBlock | str"  # the block before it; of a first one the salt
    step: int  # the last one that writes into it
    further: list[int]  # a block of each further group, the null block where none is committed
    child: "CachedBlock | None" = None  # the first block after it; most have no other
    # In the order in which they came, as replays repeat it.
    others: "dict[CachedBlock, None] | None" = None

    def children(self) -> "list[CachedBlock]":
        """The blocks after it."""
        return [*([] if self.child is None else [self.child]), *(self.others or ())]

    def adopt(self, entry: "CachedBlock") -> None:
        """A block comes after it."""
        if self.child is None:
            self.child = entry
        elif self.others is None:
            self.others = {entry: None}
        else:
            self.others[entry] = None

    def disown(self, entry: "CachedBlock") -> None:
        """A block that came after it is evicted."""
        if self.child is entry:
            self.child = None
        else:
            assert self.others is not None, f"block {entry.block_id} is no child of its parent"
            del self.others[entry]


NO_FURTHER: list[int] = []  # of every block where there is one KV-cache group
FIRST_HASHED = 4  # blocks of a prompt of which none may be a hit


class Chain:
    """One request's tokens as full blocks, hashed as far as was asked for."""

    def __init__(self, salt: str, read: Callable[[int, int], bytes]) -> None:
        self.salt = salt
        self.entries: list[CachedBlock] = []  # its first blocks that were committed, as of the last look
        self._read = read  # the tokens from one position to before another, as int32
        self.digests: list[bytes] = []
        self.contents: list[bytes] = []  # of the same blocks

    def hash(self, num_blocks: int, cache: "PrefixCache") -> None:
        """Have so many full blocks hashed, or more."""
        known, size = len(self.digests), cache.block_size
        if known < num_blocks:
            read = self._read(known * size, num_blocks * size)
            digest, hashed = self.digests[-1] if known else self.salt.encode(), cache.digest
            blocks = [read[start : start + 4 * size] for start in range(0, len(read), 4 * size)]
            self.digests += [digest := hashed(digest + block) for block in blocks]
            self.contents += blocks


class PrefixCache:
    """An index of committed blocks by the hash of their tokens and of all before them.

    A hash only finds a candidate: a hit has the same tokens after the same block, so that neither equal
    hashes nor equal tokens after other ones are mistaken for it. Of several blocks with one hash, the first
    is committed. When a block is evicted, so is what comes after it, as nothing could hit that any more.
    """

    def __init__(self, block_size: int, num_groups: int = 1) -> None:
        self.block_size = block_size
        self.num_groups = num_groups
        self._seed = secrets.randbits(64)  # so that nobody can prepare prompts of equal hash
        self.clear()

    def __len__(self) -> int:
        return len(self._by_block)

    def clear(self) -> None:
        """Nothing is committed."""
        self._by_digest: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._by_further: dict[int, CachedBlock] = {}

    def digest(self, contents: bytes) -> bytes:
        """128 bits of hash."""
        hashed: bytes = xxhash.xxh3_128_digest(contents, self._seed)
        return hashed

    def has_first(self, salt: str, token_ids: bytes) -> bool:
        """Whether a first block of these tokens is committed, by its hash; any thread may ask."""
        return self.digest(salt.encode() + token_ids) in self._by_digest

    def match(self, chain: Chain, num_blocks: int) -> list[CachedBlock]:
        """The blocks that hold the beginning of a chain, that many at most."""
        hits: list[CachedBlock] = []
        while len(hits) < num_blocks:
            hashed = min(num_blocks, 2 * len(hits) + FIRST_HASHED)  # the rest can wait, if it is of any use
            chain.hash(hashed, self)
            for column in range(len(hits), hashed):
                entry, parent = self._by_digest.get(chain.digests[column]), hits[-1] if hits else chain.salt
                if entry is None or not _is(entry, chain.contents[column], parent):
                    return hits
                hits.append(entry)
        return hits

    def commit(
        self, chain: Chain, block_ids: Sequence[int], step: int, further: Sequence[Sequence[int]] = ()
    ) -> list[int]:
        """Commit a chain's first blocks, which that step writes last; returns those that were not committed.

        block_ids: the chain's blocks of the first KV-cache group; further: of the further groups, each as
        many. The null block stands for one that was given back: if it was evicted since, so is what follows.
        """
        entries, entered = chain.entries, list[int]()
        while entries and self._by_block.get(entries[-1].block_id) is not entries[-1]:
            entries.pop()  # evicted since: the last ones first
        if len(entries) == len(block_ids):
            return entered
        parent = entries[-1] if entries else chain.salt
        chain.hash(len(block_ids), self)
        for column in range(len(entries), len(block_ids)):
            digest, token_ids = chain.digests[column], chain.contents[column]
            entry = self._by_digest.get(digest)
            if entry is None:
                if block_ids[column] == NULL_BLOCK:
                    break
                entry = self._enter(block_ids[column], digest, token_ids, parent, step)
                entered.append(entry.block_id)
            elif not _is(entry, token_ids, parent):
                break  # another block with this hash: neither it nor what follows can be entered
            if further:
                entered += self._enter_further(entry, [group[column] for group in further], step)
            entries.append(entry)
            parent = entry
        return entered

    def evict(self, block_id: int) -> list[int]:
        """Have a block committed no more, nor those that come after it; returns them all.

        A block of a further group goes alone.
        """
        if block_id in self._by_further:
            entry = self._by_further.pop(block_id)
            entry.further[entry.further.index(block_id)] = NULL_BLOCK
            return [block_id]
        first = self._by_block[block_id]
        if isinstance(first.parent, CachedBlock):
            first.parent.disown(first)
        evicted, left = [], [first]
        while left:
            entry = left.pop()
            if entry.child is not None or entry.others:
                left.extend(entry.children())
                entry.child = entry.others = None
            del self._by_digest[entry.digest], self._by_block[entry.block_id]
            evicted.append(entry.block_id)
            for other in entry.further:
                if other != NULL_BLOCK:
                    del self._by_further[other]
                    evicted.append(other)
        return evicted

    def evict_since(self, step: int) -> set[int]:
        """Evict the blocks that this step or a later one writes into; returns them."""
        evicted: set[int] = set()
        for block_id in [entry.block_id for entry in self._by_block.values() if entry.step >= step]:
            if block_id not in evicted:
                evicted.update(self.evict(block_id))
        return evicted

    def block_ids(self) -> Iterable[int]:
        """Every block that is committed, of all groups."""
        return self._by_block.keys() | self._by_further.keys()

    def entry_of(self, block_id: int) -> CachedBlock | None:
        """What a block of the first group is committed with, if it is."""
        return self._by_block.get(block_id)

    def check(self) -> None:
        """Each entry is where its hash and its block say, and so is what it comes after; for tests."""
        assert {*self._by_digest.values()} == {*self._by_block.values()}
        entries = self._by_block.values()
        further = {other: entry for entry in entries for other in entry.further if other != NULL_BLOCK}
        assert further == self._by_further
        assert not further.keys() & self._by_block.keys()
        for block_id, entry in self._by_block.items():
            assert entry.block_id == block_id, f"block {block_id} is entered as {entry.block_id}"
            assert self._by_digest[entry.digest] is entry
            parent = entry.parent
            before = parent.digest if isinstance(parent, CachedBlock) else parent.encode()
            assert entry.digest == self.digest(before + entry.token_ids), f"block {block_id}: another hash"
            if isinstance(parent, CachedBlock):
                assert self._by_block.get(parent.block_id) is parent, f"block {block_id} has lost its parent"
                assert entry in parent.children(), f"block {block_id} is no child of its parent"

    def _enter(
        self, block_id: int, digest: bytes, token_ids: bytes, parent: CachedBlock | str, step: int
    ) -> CachedBlock:
        assert block_id not in self._by_block, f"block {block_id} is entered twice"
        further = [NULL_BLOCK] * (self.num_groups - 1) if self.num_groups > 1 else NO_FURTHER
        entry = CachedBlock(block_id, digest, token_ids, parent, step, further)
        self._by_digest[digest] = self._by_block[block_id] = entry
        if isinstance(parent, CachedBlock):
            parent.adopt(entry)
        return entry

    def _enter_further(self, entry: CachedBlock, block_ids: Sequence[int], step: int) -> list[int]:
        """Commit blocks of further groups where none is; returns them. A failed step evicts the entry."""
        entered = []
        for which, block_id in enumerate(block_ids):
            if block_id != NULL_BLOCK and entry.further[which] == NULL_BLOCK:
                entry.further[which] = block_id
                self._by_further[block_id] = entry
                entry.step = max(entry.step, step)
                entered.append(block_id)
        return entered


def _is(entry: CachedBlock, token_ids: bytes, parent: CachedBlock | str) -> bool:
    """Whether a block holds these tokens after that one."""
    return entry.token_ids == token_ids and entry.parent == parent
