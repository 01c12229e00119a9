"""What the device is to be sent of block tables: the newest blocks, or all of a table in another row."""

from collections.abc import Iterable, Sequence

import numpy as np

from ..kv_cache.manager import KVCacheManager
from ..protocol.scheduler_output import NULL_BLOCK, Ints
from .request import Request

NOTHING = np.zeros((3, 0), np.int64)


class TableUpdates:
    """Which block tables of a running batch the device does not have as they are."""

    def __init__(self, max_num_rows: int, num_spare: int = 0) -> None:
        """num_spare: columns after the last of a table that are to be of the null block, for drafts."""
        self._max_num_rows, self._num_spare = max_num_rows, num_spare
        self.clear()

    def clear(self) -> None:
        """Nothing is to be sent."""
        self._resend: dict[Request, None] = {}  # the device has not the whole table in its row
        # Rows, columns and blocks, those of each group, that tables have grown by since they were sent.
        self._grown: tuple[Sequence[int], Sequence[int], Sequence[int]] = ((), (), ())

    def resend(self, *requests: Request) -> None:
        """All of these requests' tables is to be sent, to the rows that they have then."""
        self._resend |= dict.fromkeys(requests)

    def discard(self, request: Request) -> None:
        """A request has no row any more."""
        self._resend.pop(request, None)

    def grow(self, rows: Sequence[int], columns: Sequence[int], block_ids: Sequence[int]) -> None:
        """These rows have a block more in that column, of each group; of one group after another."""
        self._grown = rows, columns, block_ids

    def take(self, kv_cache: KVCacheManager) -> Ints:
        """What is to be sent, taken as sent: rows, columns and block ids [3, num_new].

        The rows of each group come after all of those before, max_num_rows of them.
        """
        if not self._resend and not self._grown[0]:
            return NOTHING
        num_groups = kv_cache.num_groups
        firsts = range(0, self._max_num_rows * num_groups, self._max_num_rows)  # of each group's rows
        grown, columns_grown, block_ids = self._grown
        null_blocks = (NULL_BLOCK,) * self._num_spare
        rows: list[int] = []
        columns = [*columns_grown] * num_groups
        blocks: list[int] = []
        for group, first in enumerate(firsts):
            rows += [first + row for row in grown]
            blocks += block_ids[group::num_groups]
        if self._num_spare:
            blocks += [NULL_BLOCK] * self._spare(rows, columns)
        for request in self._resend:
            for first, table in zip(firsts, kv_cache.tables(request.request_id), strict=True):
                rows += [first + request.row] * (len(table) + self._num_spare)
                columns += range(len(table) + self._num_spare)
                blocks += (*table, *null_blocks)
        self.clear()
        return np.array(rows + columns + blocks, np.int64).reshape(3, -1)

    def _spare(self, rows: list[int], columns: list[int]) -> int:
        """Add the columns that are to be of the null block now that tables have grown by these; how many."""
        grown = {*zip(rows, columns, strict=True)}
        further = ((row, column + self._num_spare) for row, column in zip(rows, columns, strict=True))
        spare = [place for place in further if place not in grown]
        rows += [row for row, _ in spare]
        columns += [column for _, column in spare]
        return len(spare)

    def check(self, requests: Iterable[Request]) -> None:
        """Only of requests with a row anything is to be sent; for tests."""
        assert self._resend.keys() <= {*requests}
