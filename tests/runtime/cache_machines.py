"""Machines that lead the cache through random histories, with what a device's memory would hold beside it."""

from array import array
from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lamina.runtime.kv_cache.block_pool import BlockPool
from lamina.runtime.kv_cache.manager import KVCacheManager

from .tally import CACHE


class Owner:
    """A request as far as the cache knows one, with what a model has computed of it."""

    def __init__(self, request_id, tokens, cache_salt):
        self.request_id, self.tokens, self.cache_salt = request_id, tokens, cache_salt
        self.num_hits = self.num_computed = 0

    def token_bytes(self, start, stop):
        return array("i", self.tokens[start:stop]).tobytes()


TOKENS = st.sampled_from([0, 0, 0, 1])  # so that many begin alike
BLOCKS = st.sampled_from([10, 6, 14, 3, 1])
STEPS_IN_FLIGHT = 3  # the last ones, which may still fail


class KVCacheMachine(RuleBasedStateMachine):
    """Requests come, compute, share, fail and go; `slots` is what the device's memory holds."""

    @initialize(blocks=BLOCKS, block_size=st.integers(1, 3), prefix_cache=st.sampled_from([1, 1, 0]))
    def start(self, blocks, block_size, prefix_cache, kind="programs", **more):
        self.cache = KVCacheManager(
            BlockPool(blocks + 1), block_size, prefix_cache=bool(prefix_cache), **more
        )
        self.slots, self.owners, self.step, self.undo = {}, {}, 0, []
        self.num_owners = 0
        self.waiting = {}  # owners that have given back their blocks, and will come again
        self.host, self.copied = {}, []  # what is in the slots of the host, and the copies of each step
        CACHE[kind] += 1

    @rule(
        tokens=st.lists(TOKENS, min_size=1, max_size=12),
        salt=st.sampled_from(["", "", "a"]),
        spare=st.sampled_from([0, 0, 1, 2]),
        count=st.integers(0, 12),
    )
    def admit(self, tokens, salt, spare, count):
        """A request comes, and so many of its tokens are computed at once."""
        self.num_owners += 1
        owner = Owner(str(self.num_owners), tokens, salt)
        pool = self.cache.pool
        before = pool.num_free, pool.num_cached, pool.num_used
        hits = self.cache.admit(owner, len(tokens), num_reusable=len(tokens) - 1, spare_blocks=spare)
        if hits is None:
            assert (pool.num_free, pool.num_cached, pool.num_used) == before
            assert self.blocks(len(tokens)) + spare > pool.num_available or self.cache.prefix
            self.cache.free(owner.request_id)
            CACHE["tables refused"] += 1
            return
        CACHE.update({"tables": 1, "prefix-cache hits": hits})
        assert pool.num_available >= spare
        assert hits % self.cache.block_size == 0
        assert hits < len(tokens), "the last token is to be computed"
        owner.num_hits = owner.num_computed = hits
        self.owners[owner.request_id] = owner
        self.undo.append((self.step, owner, hits))
        if count:
            self.compute_of(owner, [], count)

    @rule(data=st.data(), more=st.lists(TOKENS, max_size=4), count=st.integers(1, 5))
    def compute(self, data, more, count):
        """A step of one request: it grows, writes some tokens and commits its full blocks."""
        owner = self.draw(data)
        if owner is not None:
            self.compute_of(owner, more, count)

    def compute_of(self, owner, more, count):
        owner_tokens = owner.tokens + more
        if not self.cache.grow(owner.request_id, len(owner_tokens)):
            return
        owner.tokens = owner_tokens
        self.launch()
        self.undo.append((self.step, owner, owner.num_computed))
        table = self.cache.block_ids(owner.request_id)
        users = Counter(block for name in self.owners for block in self.cache.block_ids(name))
        stop = min(owner.num_computed + count, len(owner.tokens))
        for position in range(owner.num_computed, stop):
            block = table[position // self.cache.block_size]
            assert users[block] == 1, "a shared block is written"
            assert not self.cache.pool.is_kept(block), "a committed block is written"
            self.slots[block, position % self.cache.block_size] = owner.tokens[position]
        owner.num_computed = stop
        CACHE["steps"] += 1
        self.cache.commit(owner, stop, self.step)
        over = self.step - STEPS_IN_FLIGHT
        undone = [computed for step, other, computed in self.undo if other is owner and step > over]
        self.cache.release(owner, min(undone), over)

    def launch(self):
        """A step begins, with its copies."""
        self.step += 1
        copies = self.cache.copies(self.step)
        self.copied.append((self.step, copies))
        self.copy(copies)
        CACHE.update({"blocks swapped out": len(copies.swap_out), "blocks swapped in": len(copies.swap_in)})

    def copy(self, copies):
        for block, slot in copies.swap_out:
            self.host[slot] = [self.slots.get((block, place)) for place in range(self.cache.block_size)]
        for slot, block in copies.swap_in:
            for place, token in enumerate(self.host[slot]):
                self.slots[block, place] = token

    def spoil(self, first):
        """What failed steps copied is not there."""
        for step, copies in self.copied:
            if step >= first:
                for _, slot in copies.swap_out:
                    self.host[slot] = [None] * self.cache.block_size
                for _, block in copies.swap_in:
                    self.slots |= dict.fromkeys((block, place) for place in range(self.cache.block_size))
        self.copied = [(step, copies) for step, copies in self.copied if step < first]

    @rule(data=st.data(), keep=st.booleans())
    def leave(self, data, keep):
        owner = self.draw(data)
        if owner is not None:
            if keep:
                self.cache.commit(owner, owner.num_computed, 0)
            self.drop(owner)

    @rule(count=st.integers(1, STEPS_IN_FLIGHT))
    def fail(self, count):
        """The last steps never were: what they wrote is gone, and so are those who counted on it."""
        first = self.step - count + 1
        if first < 1:
            return
        CACHE["failed steps"] += count
        self.spoil(first)
        for step, owner, computed in reversed(self.undo):
            if step >= first and owner.request_id in self.owners and computed < owner.num_computed:
                table = self.cache.block_ids(owner.request_id)
                for position in range(computed, owner.num_computed):
                    self.slots[table[position // self.cache.block_size], position % self.cache.block_size] = (
                        None
                    )
                owner.num_computed = max(computed, owner.num_hits)
        for name in self.cache.uncommit(first):
            self.drop(self.owners[name])

    def draw(self, data):
        return self.owners[data.draw(st.sampled_from(sorted(self.owners)))] if self.owners else None

    def drop(self, owner):
        self.cache.free(owner.request_id)
        del self.owners[owner.request_id]

    def blocks(self, num_tokens):
        return -(-num_tokens // self.cache.block_size)

    @invariant()
    def everything_adds_up(self):
        if not hasattr(self, "cache"):
            return
        pool = self.cache.pool
        assert pool.num_free + pool.num_cached + pool.num_used == pool.num_usable
        self.cache.check({name: owner.num_computed for name, owner in self.owners.items()}, self.waiting)

    @invariant()
    def every_table_holds_its_tokens(self):
        for name, owner in getattr(self, "owners", {}).items():
            table, size = self.cache.block_ids(name), self.cache.block_size
            window = self.cache.windows[0] or owner.num_computed + 1
            seen = range(max(0, owner.num_computed - window + 1), owner.num_computed)
            held = [self.slots.get((table[p // size], p % size)) for p in seen]
            assert held == [owner.tokens[p] for p in seen], f"{name} reads another's tokens"

    def teardown(self):
        for owner in [*getattr(self, "owners", {}).values()]:
            self.drop(owner)
        for name in getattr(self, "waiting", ()):
            self.cache.free(name)
        self.waiting = {}
        self.everything_adds_up()
        assert not hasattr(self, "cache") or not self.cache.swap or self.cache.swap.num_used == 0


class WindowMachine(KVCacheMachine):
    """The same where every layer sees a window alone."""

    @initialize(
        blocks=BLOCKS,
        block_size=st.integers(1, 3),
        prefix_cache=st.sampled_from([1, 1, 0]),
        window=st.integers(1, 5),
    )
    def start(self, window, **limits):
        super().start(kind="programs with windows", windows=(window,), **limits)


class SwapMachine(KVCacheMachine):
    """The same with a host, and requests that take turns: one gives back its blocks, to come again later."""

    @initialize(
        blocks=st.sampled_from([6, 4, 9]),
        block_size=st.integers(1, 2),
        swap_slots=st.sampled_from([6, 12, 2, 1]),
        first=st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=8), min_size=3, max_size=5),
    )
    def start(self, first, **limits):
        super().start(kind="programs with a host", prefix_cache=1, **limits)
        self.waiting = {f"first {n}": Owner(f"first {n}", tokens, "") for n, tokens in enumerate(first)}

    @rule(turns=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 8)), min_size=2))
    def turn(self, turns):
        """Somebody leaves, and others come in its place; each computes some of what it lacks."""
        for suspended, resumed, count in turns:
            if self.owners:
                self.suspend(sorted(self.owners)[suspended % len(self.owners)])
            for name in [*sorted(self.waiting)[resumed:], *sorted(self.waiting)[:resumed]]:
                self.resume(name, count)
            self.everything_adds_up()
            self.every_table_holds_its_tokens()

    def suspend(self, name):
        """Once no step that it is part of may fail any more."""
        self.step += STEPS_IN_FLIGHT
        owner = self.waiting[name] = self.owners.pop(name)
        self.cache.commit(owner, owner.num_computed, 0)
        self.cache.suspend(name)

    def resume(self, name, count):
        owner, step = self.waiting[name], self.step + 1
        length = len(owner.tokens)
        hits = self.cache.admit(owner, length, num_reusable=length - 1, step=step)
        if hits is not None:
            owner.num_hits = owner.num_computed = hits
            self.owners[name] = self.waiting.pop(name)
            self.launch()
            self.undo.append((step, owner, hits))
            self.cache.commit(owner, hits, step)
            if count:
                self.compute_of(owner, [0], count)

    @rule(which=st.integers(0, 4))
    def give_up(self, which):
        if which < len(self.waiting):
            name = sorted(self.waiting)[which]
            self.cache.free(name)
            del self.waiting[name]
