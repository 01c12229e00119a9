"""The running batch: requests with their counts as columns, so that a step is a few array operations."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..kv_cache.manager import KVCacheManager
from ..protocol.scheduler_output import ON_HOST, Flags, Ints, SchedulerOutput
from .draft_counts import DRAFT_COUNTS, FIRST_COUNTS, DraftCounts
from .in_flight import Launched
from .request import Request
from .row_sampling import RowSampling
from .step_tokens import step_token_ids
from .table_updates import TableUpdates

COUNTS = (
    "computed",  # tokens that are certain to be in the cache once every step launched so far is over
    "total",  # tokens it has, those included that steps launched and not yet read are certain to yield
    "known",  # of them, those that the host has read
    "limit",  # tokens it may have in all
    "num_prompt",
    "newest",  # the last token the host has read
    "place",  # the row of the last step launched, if that samples its next token, or ON_HOST
    "last_step",  # launched with a part of it
    "blocks",  # in its block table
    "most_blocks",  # that it may come to have
    "serial",  # of what has the row: another one each time that a request gets a row, 0 for nothing
    *DRAFT_COUNTS,
)


class RunningBatch:
    """Requests in no order; row i is row i of a step's tensors, and of every column here.

    A request keeps its row for as long as it has one, unless one before it leaves and it is the last: then it
    takes that place, so that there is no gap. So whoever comes and goes changes nothing for the others.

    A request that has all its tokens in flight is draining: it runs, but needs no row any more.
    """

    def __init__(self, max_num_rows: int, num_spare_columns: int = 0, reads_all: bool = False) -> None:
        """num_spare_columns: of the null block, after the last of each block table."""
        self._reads_all = reads_all  # whether a row goes on only once the host has read its newest token
        self._counts = np.zeros((len(COUNTS), max_num_rows), np.int64)
        (
            self._computed,
            self._total,
            self._known,
            self._limit,
            self._num_prompt,
            self._newest,
            self._place,
            self._last_step,
            self._blocks,
            self._most_blocks,
            self._serial,
            *_,
        ) = self._counts
        self.requests: list[Request] = []  # by row, to be read alone
        columns = dict(zip(COUNTS, self._counts, strict=True))
        self.sampling = RowSampling(self.requests, columns)
        self.drafts = DraftCounts(columns, reads_all)
        self._tables = TableUpdates(max_num_rows, num_spare_columns)
        self._numbers = np.full(max_num_rows, ON_HOST) if reads_all else np.arange(max_num_rows)
        self._request_ids: tuple[str, ...] | None = None
        self._by_rank: Ints | None = None
        self._num_serials = 0
        self.clear()

    def clear(self) -> None:
        """Nobody runs."""
        for request in self.requests:
            request.enter_row(-1)
        self.requests.clear()
        self._ids: list[str] = []
        self._draining: dict[str, Request] = {}
        self._filling: dict[Request, int] = {}  # to be computed up to the token they had when they got a row
        self.sampling.clear()
        self._tables.clear()
        self._serial[:] = 0
        self._all_in_reach = True
        self._changed()

    def __len__(self) -> int:
        return len(self.requests)

    def __bool__(self) -> bool:
        return bool(self.requests or self._draining)

    @property
    def num_running(self) -> int:
        """Requests with a row, and those that are draining."""
        return len(self.requests) + len(self._draining)

    @property
    def draining(self) -> list[Request]:
        """Who has all tokens in flight."""
        return [*self._draining.values()]

    def append(
        self, request: Request, *, blocks: int, most_blocks: int, computed: int, in_flight: int = 0
    ) -> None:
        """A row for a request that has a block table, and so many tokens computed and in flight."""
        row, num_tokens = len(self.requests), request.num_tokens
        request.enter_row(row)
        self.requests.append(request)
        self._ids.append(request.request_id)
        self._changed()
        self._num_serials += 1
        self._counts[:, row] = (
            computed,
            num_tokens + in_flight,
            num_tokens,
            request.max_total_tokens,
            len(request.prompt_token_ids),
            (request.output_token_ids or request.prompt_token_ids)[-1],
            ON_HOST,
            request.last_step,
            blocks,
            most_blocks,
            self._num_serials,
            *FIRST_COUNTS,
        )
        self.sampling.enter(row, request)
        self._all_in_reach &= not in_flight
        self._tables.resend(request)
        if computed < num_tokens:
            self._filling[request] = num_tokens

    def drain(self, request: Request) -> None:
        """A request without a row has all its tokens in flight."""
        self._draining[request.request_id] = request

    def discard(self, request: Request) -> None:
        """Take a request out, if it runs."""
        self._draining.pop(request.request_id, None)
        if request.row >= 0:
            self.remove([request.row])

    def remove(self, rows: Collection[int]) -> None:
        """Take requests out of their rows; the last ones take their places."""
        for row in sorted(rows, reverse=True):
            request = self.requests[row]
            self.sampling.leave(row, request)
            self._tables.discard(request)
            self._filling.pop(request, None)
            request.leave_row(int(self._last_step[row]), int(self._computed[row]))
            last, own_id = self.requests.pop(), self._ids.pop()
            if last is not request:
                self._put(last, own_id, row)
            self._serial[len(self)] = 0
        if rows:
            self._changed()

    def put_first(self, counts: Ints) -> Ints:
        """Let rows with a count come before all others, moving as few as can be; returns their counts."""
        chosen = counts > 0
        num = int(np.count_nonzero(chosen))
        others, late = (~chosen[:num]).nonzero()[0], num + chosen[num:].nonzero()[0]
        to, source = np.concatenate((others, late)), np.concatenate((late, others))
        self._counts[:, to] = self._counts[:, source]
        self.sampling.move(to, source)
        moved = [self.requests[row] for row in source.tolist()]
        for row, request in zip(to.tolist(), moved, strict=True):
            self.requests[row], self._ids[row] = request, request.request_id
            request.enter_row(row)
            self._tables.resend(request)
        self._changed()
        first = counts[:num].copy()
        first[others] = counts[late]
        return first

    def grow(self, rows: Ints, block_ids: Sequence[int], *, rows_stay: bool) -> None:
        """A column for each of these rows in its block table, one group's blocks after another's.

        rows: in order, each as often as it gets a column. rows_stay: whether none moves before the launch, so
        that the new blocks alone are sent.
        """
        if rows_stay:
            columns = self._blocks[rows] + np.arange(len(rows)) - np.searchsorted(rows, rows)
            self._tables.grow(rows.tolist(), columns.tolist(), block_ids)
        else:
            self._tables.resend(*(self.requests[row] for row in rows.tolist()))
        np.add.at(self._blocks, rows, 1)

    def resize_table(self, request: Request, num_blocks: int) -> None:
        """The block table of a request with a row has so many columns now."""
        self._blocks[request.row] = num_blocks
        self._tables.resend(request)

    def launch(self, plan: SchedulerOutput) -> None:
        """A plan of the first rows is in flight; whoever has all tokens in flight then gives up the row.

        All but the first of a row's samples are drafts. One token is certain; drafts are as if they never
        were until the host has read which of them hold. So long, only the device knows which token is the
        newest, and how many there are.
        """
        num, num_sampled, num_samples = plan.num_rows, plan.num_sampled_tokens, plan.num_samples
        self._computed[:num] += plan.num_scheduled_tokens
        self._last_step[:num] = plan.step
        num_sampling = np.count_nonzero(num_sampled)  # rows; as many as samples, where no draft is
        self._all_in_reach = num_sampling == len(self) and not self._reads_all
        if self._all_in_reach:
            self._total[:num] += 1
            self._place[:num] = self._numbers[:num]
        else:
            samples = num_sampled > 0
            self._total[:num] += samples
            self._place[: len(self)] = ON_HOST
            self._place[:num][samples] = self._numbers[:num][samples]
        if num_samples > num_sampling:
            self._computed[:num] -= (num_sampled - 1).clip(0)
        self.drafts.launch(plan)
        self._drain(num)

    def take_in(self, launched: Launched, num_yielded: Ints, tokens: Ints) -> list[Request]:
        """The host has read a step's tokens, so many of each of its rows.

        Returns those, of all that yielded any, who are not in the rows that they had.
        """
        requests, num = launched.requests, len(launched.requests)
        same = self._serial[:num] == launched.serials
        away: list[int] = (~same).nonzero()[0].tolist()
        if launched.foretold:
            same &= np.array([request not in launched.foretold for request in requests])
            away = [place for place in away if requests[place] not in launched.foretold]
        num_yielding = np.count_nonzero(num_yielded)
        if launched.plan.num_samples > num_yielding:
            self.drafts.judge(launched)
        has_drafts = num_yielding < len(tokens)
        if num_yielding < num or has_drafts:
            samples = num_yielded > 0
            same &= samples
            by_row = np.zeros(num, np.int64)
            by_row[samples] = tokens[np.cumsum(num_yielded)[samples] - 1] if has_drafts else tokens
            tokens = by_row
            away = [place for place in away if samples[place]]
        if launched.plan.num_samples > num_yielding:
            self._hold(slice(num), np.where(same, num_yielded - 1, 0))
        self._known[:num] += same
        np.copyto(self._newest[:num], tokens, where=same)
        for place in away:
            row = requests[place].row
            if row >= 0:
                self._hold(row, num_yielded[place] - 1)
                self._known[row] += 1
                self._newest[row] = tokens[place]
        if launched.plan.num_samples > num_yielding:
            self._drain(len(self))
        return [requests[place] for place in away]

    def force(self, request: Request, count: int) -> None:
        """A request has so many tokens more that the host knows, some of which may be in flight."""
        if (row := request.row) >= 0:
            self._known[row] += count
            self._total[row] = max(self._total[row], self._known[row])
            self._newest[row] = request.output_token_ids[-1]

    def fills(self, counts: Ints) -> list[tuple[Request, int]]:
        """Who catches up in a step of so many tokens of each row, and how many tokens it has in blocks then.

        Whoever has caught up is not asked about any more.
        """
        filled = []
        for request, to_fill in [*self._filling.items()]:
            computed, count = int(self._computed[request.row]), int(counts[request.row])
            if computed >= to_fill:
                del self._filling[request]
            elif count:
                filled.append((request, min(computed + count, to_fill)))
        return filled

    def check(self, in_flight: Mapping[Request, int]) -> None:
        """Every column says what the requests do; for tests. in_flight: tokens in flight, of each."""
        assert [request.row for request in self.requests] == list(range(len(self)))
        assert [request.request_id for request in self.requests] == list(self.request_ids(len(self)))
        for row, request in enumerate(self.requests):
            known, flying = request.num_tokens, in_flight[request]
            assert (self._known[row], self._total[row]) == (known, known + flying), request
            assert self._computed[row] < known + flying < request.max_total_tokens, request
            assert self._limit[row] == request.max_total_tokens, request
            assert self._newest[row] == request.token_ids(known - 1, known)[0], request
            assert self._blocks[row] <= self._most_blocks[row], request
            assert request in self._filling or self._computed[row] >= self._num_prompt[row], request
        assert self._filling.keys() <= {*self.requests}
        for request in self._draining.values():
            assert request.row == -1, request
            assert request.num_tokens + in_flight[request] >= request.max_total_tokens, request
        serials = self._serial[: len(self)].tolist()
        assert len({*serials, 0}) == len(self) + 1, "two rows have the same serial"
        assert not self._serial[len(self) :].any(), "a row without a request has a serial"
        self.sampling.check()
        self._tables.check(self.requests)

    def num_computed(self, request: Request) -> int:
        """Tokens of a request that are in the cache once every step in flight is over, wherever it stands."""
        return int(self._computed[request.row]) if request.row >= 0 else request.num_computed

    def computed(self, num: int) -> Ints:
        """Tokens computed of each of the first rows, a copy [num]."""
        return self._computed[:num].copy()

    def uncomputed(self) -> Ints:
        """Tokens of each row that no step was launched for, [rows]."""
        num = len(self.requests)
        uncomputed: Ints = self._total[:num] - self._computed[:num]
        return uncomputed

    def num_sampled(self, counts: Ints) -> Ints:
        """Tokens that so many of each of the first rows yield at most.

        One where none is left uncomputed, and one for each draft beyond, else 0.
        """
        num = len(counts)
        sampled: Ints = (self._computed[:num] + counts - self._total[:num] + 1).clip(0)
        return sampled

    def sources(self, num: int) -> Ints:
        """The rows of the last step that sampled the newest token of the first rows, or ON_HOST; [num]."""
        sources: Ints = np.where(self._total[:num] > self._known[:num], self._place[:num], ON_HOST)
        return sources

    def serials(self, num: int) -> Ints:
        """What tells later who has the first rows now, a copy [num]."""
        return self._serial[:num].copy()

    def blocks_to_grow(self, most: int) -> int:
        """Blocks that the rows may come to need in all, of each at most so many."""
        num = len(self.requests)
        return int(np.add.reduce(np.minimum(self._most_blocks[:num] - self._blocks[:num], most)))

    def new_blocks(self, kv_cache: KVCacheManager) -> Ints:
        """Block table entries that the device has not, [3, num_new] as a plan has them, taken as sent."""
        return self._tables.take(kv_cache)

    def request_ids(self, num: int) -> tuple[str, ...]:
        """Whose the first rows are; the same tuple while nothing changes."""
        if self._request_ids is None:
            self._request_ids = tuple(self._ids)
        return self._request_ids if num == len(self) else self._request_ids[:num]

    @property
    def any_answers(self) -> bool:
        """Whether any with a row has computed its whole prompt."""
        computed, num_prompt, filling = self._computed, self._num_prompt, self._filling
        return len(filling) < len(self) or any(computed[r.row] >= num_prompt[r.row] for r in filling)

    @property
    def by_rank(self) -> Ints:
        """All rows in order of their requests' ranks; the same array while nothing changes."""
        if self._by_rank is None:
            ranked = sorted(range(len(self)), key=lambda row: self.requests[row].rank)
            self._by_rank = np.array(ranked, np.int64)
        return self._by_rank

    def out_of_reach(self) -> Flags | None:
        """Rows whose newest token neither the host has read nor the last step sampled; None for none."""
        if self._all_in_reach:
            return None
        num = len(self)
        lost = (self._place[:num] == ON_HOST) & (self._total[:num] > self._known[:num])
        return lost if lost.any() else None

    def token_ids(self, counts: Ints) -> NDArray[np.int32]:
        """See step_token_ids."""
        columns = (column[: len(counts)] for column in (self._newest, self._computed, self._total))
        return step_token_ids(counts, self.requests, *columns)

    def _put(self, request: Request, request_id: str, row: int) -> None:
        """Copy the row after the last into another; of its block table the device knows nothing then."""
        old = len(self)
        request.enter_row(row)
        self.requests[row], self._ids[row] = request, request_id
        self._counts[:, row] = self._counts[:, old]
        self.sampling.move(row, old)
        self._tables.resend(request)

    def _drain(self, num: int) -> None:
        """Whoever of the first rows has all tokens in flight gives up the row."""
        drained = (self._total[:num] >= self._limit[:num]).nonzero()[0].tolist()
        for row in drained:
            if self._known[row] < self._limit[row]:
                self.drain(self.requests[row])
        self.remove(drained)

    def _hold(self, rows: slice | int, num_drafts: Ints) -> None:
        """So many drafts of these rows were right: tokens that are known, and computed.

        Steps in flight may compute more than all that a request may have: what is beyond is written nowhere.
        """
        self._total[rows] += num_drafts
        self._known[rows] += num_drafts
        self.sampling.hold(rows, num_drafts)
        self._computed[rows] = np.minimum(self._computed[rows] + num_drafts, self._limit[rows] - 1)

    def _changed(self) -> None:
        """Drop what is remembered of the rows as a whole."""
        self._request_ids = self._by_rank = None
