"""The prefix cache: which full blocks hold which tokens after which others: found by hash, held to tokens."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import xxhash

from ..protocol.scheduler_output import NULL_BLOCK


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A full block whose contents are known: its tokens, and what comes before them.

    Its sides are blocks with the same tokens of other groups of layers, each of which may be forgotten alone.
    """

    block_id: int
    digest: bytes
    token_ids: bytes  # int32
    parent: "CachedBlock | str"  # the block before it; of a first one the salt
    step: int  # the last one that writes into it
    sides: list[int]  # the null block where one is not known
    child: "CachedBlock | None" = None  # the first block after it; most have no other
    # In the order in which they came, as recordings repeat it.
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
        """A block that came after it is forgotten."""
        if self.child is entry:
            self.child = None
        else:
            assert self.others is not None, f"block {entry.block_id} is no child of its parent"
            del self.others[entry]


NO_SIDES: list[int] = []  # of every block where there is one group of layers


FIRST_HASHED = 4  # blocks of a prompt of which none may be known


class Chain:
    """One request's tokens as full blocks, hashed as far as was asked for."""

    def __init__(self, salt: str, read: Callable[[int, int], bytes]) -> None:
        self.salt = salt
        self.entries: list[CachedBlock] = []  # what is known of its beginning, as of the last look
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
    """An index of full blocks by the hash of their tokens and of all before them.

    A hash only finds a candidate: a hit has the same tokens after the same block, so that neither equal
    hashes nor equal tokens after other ones are mistaken for it. Of several blocks with one hash, the first
    is known. When a block is forgotten, so is what comes after it, as nothing could find that any more.
    """

    def __init__(self, block_size: int, num_sides: int = 0) -> None:
        self.block_size = block_size
        self.num_sides = num_sides
        self._seed = secrets.randbits(64)  # so that nobody can prepare prompts of equal hash
        self.clear()

    def __len__(self) -> int:
        return len(self._by_block)

    def clear(self) -> None:
        """Nothing is known."""
        self._by_digest: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._by_side: dict[int, CachedBlock] = {}

    def digest(self, contents: bytes) -> bytes:
        """128 bits of hash."""
        hashed: bytes = xxhash.xxh3_128_digest(contents, self._seed)
        return hashed

    def match(self, chain: Chain, num_blocks: int) -> list[CachedBlock]:
        """The blocks that hold the beginning of a chain, that many at most."""
        found: list[CachedBlock] = []
        while len(found) < num_blocks:
            hashed = min(num_blocks, 2 * len(found) + FIRST_HASHED)  # the rest can wait, if it is of any use
            chain.hash(hashed, self)
            for place in range(len(found), hashed):
                entry, parent = self._by_digest.get(chain.digests[place]), found[-1] if found else chain.salt
                if entry is None or not _is(entry, chain.contents[place], parent):
                    return found
                found.append(entry)
        return found

    def commit(
        self, chain: Chain, block_ids: Sequence[int], step: int, sides: Sequence[Sequence[int]] = ()
    ) -> list[int]:
        """Enter what is not known of a chain's first blocks, which these hold; returns those entered.

        The null block stands for one that was given back: if it was forgotten since, so is what follows. A
        side that was forgotten is entered anew.
        """
        entries, entered = chain.entries, list[int]()
        while entries and self._by_block.get(entries[-1].block_id) is not entries[-1]:
            entries.pop()  # forgotten since: the last ones first
        if len(entries) == len(block_ids):
            return entered
        parent = entries[-1] if entries else chain.salt
        chain.hash(len(block_ids), self)
        for place in range(len(entries), len(block_ids)):
            digest, token_ids = chain.digests[place], chain.contents[place]
            entry = self._by_digest.get(digest)
            if entry is None:
                if block_ids[place] == NULL_BLOCK:
                    break
                entry = self._enter(block_ids[place], digest, token_ids, parent, step)
                entered.append(entry.block_id)
            elif not _is(entry, token_ids, parent):
                break  # another block with this hash: neither it nor what follows can be entered
            if sides:
                entered += self._enter_sides(entry, [side[place] for side in sides], step)
            entries.append(entry)
            parent = entry
        return entered

    def drop(self, block_id: int) -> list[int]:
        """Forget a block and those that come after it, or a side alone; returns them all."""
        if block_id in self._by_side:
            entry = self._by_side.pop(block_id)
            entry.sides[entry.sides.index(block_id)] = NULL_BLOCK
            return [block_id]
        first = self._by_block[block_id]
        if isinstance(first.parent, CachedBlock):
            first.parent.disown(first)
        dropped, left = [], [first]
        while left:
            entry = left.pop()
            if entry.child is not None or entry.others:
                left.extend(entry.children())
                entry.child = entry.others = None
            del self._by_digest[entry.digest], self._by_block[entry.block_id]
            dropped.append(entry.block_id)
            for side in entry.sides:
                if side != NULL_BLOCK:
                    del self._by_side[side]
                    dropped.append(side)
        return dropped

    def drop_since(self, step: int) -> set[int]:
        """Forget the blocks that this step or a later one writes into; returns them."""
        dropped: set[int] = set()
        for block_id in [entry.block_id for entry in self._by_block.values() if entry.step >= step]:
            if block_id not in dropped:
                dropped.update(self.drop(block_id))
        return dropped

    def block_ids(self) -> Iterable[int]:
        """Every block that is known."""
        return self._by_block.keys() | self._by_side.keys()

    def known(self, block_id: int) -> CachedBlock | None:
        """What a block is known to hold; of sides nothing."""
        return self._by_block.get(block_id)

    def check(self) -> None:
        """Each entry is where its hash and its block say, and so is what it comes after; for tests."""
        assert {*self._by_digest.values()} == {*self._by_block.values()}
        sides = {
            side: entry for entry in self._by_block.values() for side in entry.sides if side != NULL_BLOCK
        }
        assert sides == self._by_side
        assert not sides.keys() & self._by_block.keys()
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
        sides = [NULL_BLOCK] * self.num_sides if self.num_sides else NO_SIDES
        entry = CachedBlock(block_id, digest, token_ids, parent, step, sides)
        self._by_digest[digest] = self._by_block[block_id] = entry
        if isinstance(parent, CachedBlock):
            parent.adopt(entry)
        return entry

    def _enter_sides(self, entry: CachedBlock, block_ids: Sequence[int], step: int) -> list[int]:
        """Sides of which none is known so far; returns them. If the step fails, all of the entry goes."""
        entered = []
        for which, block_id in enumerate(block_ids):
            if block_id != NULL_BLOCK and entry.sides[which] == NULL_BLOCK:
                entry.sides[which] = block_id
                self._by_side[block_id] = entry
                entry.step = max(entry.step, step)
                entered.append(block_id)
        return entered


def _is(entry: CachedBlock, token_ids: bytes, parent: CachedBlock | str) -> bool:
    """Whether a block holds these tokens after that one."""
    return entry.token_ids == token_ids and entry.parent == parent
