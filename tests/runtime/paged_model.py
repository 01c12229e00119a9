"""A model that hashes what paging shows it, and a step's rows one by one."""

import zlib
from bisect import bisect_right
from typing import NamedTuple

from lamina.runtime.protocol.scheduler_output import ON_HOST
from lamina.runtime.worker.input_batch import NO_ID, NO_SLOT

VOCAB = 11  # of the hashing model


def hashed(prefix, banned=()):
    """A token that depends on every token before it, and on their order."""
    allowed = [token for token in range(VOCAB) if token not in banned]
    return allowed[zlib.crc32(bytes(prefix)) % len(allowed)]


class PagedModel:
    """The part of a model that paging can get wrong: the next token hashes all tokens before it.

    It sees only the input batch: it stores (position, token) in the slot it is given and reads the prefix
    back through the block table, so that a wrong id, position, slot, table or length shows as a wrong token.
    """

    def __init__(self, block_size, next_token, windows=(None,)):
        self.block_size = block_size
        # Of each KV-cache group, positions that each token sees, its own included.
        self.window, *self.further_windows = windows
        self.next_token = next_token
        self.slots = {}
        self.host = {}  # what each slot of the host holds of a block
        self.said = {}  # token by (slot, position), of requests whose logits are adjusted

    def copy(self, copies):
        """Blocks out to the host and in from there, all of what they hold."""
        for block, slot in copies.swap_out:
            self.host[slot] = [self.slots.get(place) for place in self._places(block)]
        for slot, block in copies.swap_in:
            self.slots |= dict(zip(self._places(block), self.host[slot], strict=True))

    def spoil(self, copies):
        """What was to be copied is not there, as a device that failed promises nothing."""
        for _, slot in copies.swap_out:
            self.host[slot] = [None] * self.block_size
        for _, block in copies.swap_in:
            self.slots |= dict.fromkeys(self._places(block))

    def _places(self, block):
        return range(block * self.block_size, (block + 1) * self.block_size)

    def run(self, view, adjusted=None, *, has_drafts=False):
        """The samples of a step; with drafts, any for those that come after tokens without a block."""
        self._store(view, has_drafts)
        if has_drafts:
            return self._run_with_drafts(view, adjusted)
        prefixes = [self._prefix(view, row) for row in range(view.num_seqs)]
        starts = view.query_start_loc.tolist()[: view.num_seqs + 1]
        places = view.logits_rows.tolist()
        rows = [bisect_right(starts, place) - 1 for place in places]
        later = [starts[row + 1] - 1 - place for row, place in zip(rows, places, strict=True)]
        wholes = [prefixes[row] for row in rows]
        sampled = [self.visible(own[: len(own) - count]) for own, count in zip(wholes, later, strict=True)]
        lengths = [view.seq_lens[row] - count for row, count in zip(rows, later, strict=True)]
        assert view.sample_positions.tolist() == lengths
        if adjusted is not None:
            self._remember(view, adjusted, sampled)
        return self._chosen(view, sampled)

    def _chosen(self, view, prefixes):
        banned = [[id_ for id_ in ids if id_ != NO_ID] for ids in view.banned.tolist()]
        return [self.next_token(prefix, ids) for prefix, ids in zip(prefixes, banned, strict=True)]

    def _run_with_drafts(self, view, adjusted):
        starts, lengths = view.query_start_loc.tolist()[: view.num_seqs + 1], view.sample_positions.tolist()
        rows = [bisect_right(starts, place) - 1 for place in view.logits_rows.tolist()]
        last = {}
        prefixes = []
        for row, length in zip(rows, lengths, strict=True):
            tables = [table[row].tolist() for table in view.block_tables]
            windows = (self.window, *self.further_windows)
            try:
                seen = [self._read(*each, length, 1) for each in zip(tables, windows, strict=True)]
                last[row] = self.visible(seen[0])
            except (AssertionError, KeyError, IndexError, TypeError):
                prefixes.append(None)
                continue
            prefixes.append(last[row])
        if adjusted is not None:
            self._remember(view, adjusted, prefixes, has_drafts=True)
        return self._chosen(view, [prefix or () for prefix in prefixes])

    def _store(self, view, has_drafts=False):
        tokens = [
            *zip(
                view.token_ids.tolist(),
                view.positions.tolist(),
                view.slot_mappings[0].tolist(),
                strict=True,
            )
        ]
        for token, position, slot in tokens[: view.num_tokens]:
            if has_drafts and slot == NO_SLOT:
                continue
            assert slot >= self.block_size, "a real token goes to a real block, and never to the null block"
            self.slots[slot] = (position, token)
        assert all(token == (0, 0, -1) for token in tokens[view.num_tokens :])
        for slots in view.slot_mappings[1:]:
            for (token, position, first), slot in zip(tokens, slots.tolist(), strict=True):
                assert (slot >= self.block_size) == (first >= self.block_size)
                self.slots[slot] = (position, token)
        assert view.seq_lens[view.num_seqs :].tolist() == [0] * (len(view.seq_lens) - view.num_seqs)

    def _remember(self, view, adjusted, sampled, has_drafts=False):
        """As a device does: what it missed, then the newest token, which only it may know."""
        for slot, start, tokens in adjusted.missed:
            self.said |= {(slot, start + place): token for place, token in enumerate(tokens)}
        lengths = view.sample_positions.tolist()
        for sample, slot in zip(adjusted.samples.tolist(), adjusted.slots.tolist(), strict=True):
            length, seen = lengths[sample], sampled[sample]
            self.said[slot, length - 1] = view.token_ids[view.logits_rows[sample]].item()
            if seen is not None:  # there are blocks for it
                said = tuple(self.said[slot, place] for place in range(length))
                assert said[length - len(seen) :] == seen
        longest = max(lengths[sample] for sample in adjusted.samples.tolist())
        assert adjusted.longest >= longest if has_drafts else adjusted.longest == longest

    def _prefix(self, view, row):
        """All that the row's queries see, from the first one's window on."""
        length, starts = int(view.seq_lens[row]), view.query_start_loc.tolist()
        query_len = starts[row + 1] - starts[row]
        tokens = self._read(view.block_tables[0][row].tolist(), self.window, length, query_len)
        for window, tables in zip(self.further_windows, view.block_tables[1:], strict=True):
            others = self._read(tables[row].tolist(), window, length, query_len)
            assert tokens[len(tokens) - len(others) :] == others, "KV-cache groups hold other tokens"
        return tokens

    def _read(self, table, window, length, query_len):
        size = self.block_size
        seen = range(0 if window is None else max(0, length - query_len - window + 1), length)
        stored = [self.slots[table[p // size] * size + p % size] for p in seen]
        assert [position for position, _ in stored] == [*seen], "these slots hold other positions"
        return tuple(token for _, token in stored)

    def visible(self, prefix):
        return prefix if self.window is None else prefix[-self.window :]


class Part(NamedTuple):
    """One row of a plan; a token id is None where it is still on the device."""

    request_id: str
    token_ids: tuple[int | None, ...]
    num_computed: int
    samples: bool


def parts(plan):
    """A plan row by row."""
    ends = plan.num_scheduled_tokens.cumsum().tolist()
    rows = zip(
        plan.request_ids,
        plan.num_scheduled_tokens.tolist(),
        plan.num_computed_tokens.tolist(),
        ends,
        strict=True,
    )
    out = []
    for row, (request_id, count, computed, end) in enumerate(rows):
        ids = plan.token_ids[end - count : end].tolist()
        if plan.sources[row] != ON_HOST:
            ids[-1] = None
        out.append(Part(request_id, tuple(ids), computed, bool(plan.num_sampled_tokens[row])))
    return out
