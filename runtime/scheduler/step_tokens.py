"""The token ids of a step as far as the host knows them: ids of drafts are the device's."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..protocol.scheduler_output import Ints
from .request import Request

NO_ID = -1  # of a draft; a filler keeps it, so that it never holds


def step_token_ids(
    counts: Ints, requests: Sequence[Request], newest: Ints, computed: Ints, total: Ints
) -> NDArray[np.int32]:
    """So many uncomputed tokens of each row, row after row; any for one on the device, NO_ID for drafts.

    Of each row [rows]: its newest token, how many are computed, and how many there are; drafts come beyond.
    """
    known = newest.astype(np.int32)
    more = (total - computed > 1).nonzero()[0].tolist()
    if not more:
        return _with_drafts(known, counts)
    parts, end = [], 0
    for row in more:
        start = int(computed[row])
        contents = requests[row].token_bytes(start, start + int(counts[row]))
        parts += [_with_drafts(known[end:row], counts[end:row]), np.frombuffer(contents, np.int32)]
        end = row + 1
    return np.concatenate((*parts, _with_drafts(known[end:], counts[end:])))


def _with_drafts(newest: NDArray[np.int32], counts: Ints) -> NDArray[np.int32]:
    """The newest token of each row [rows], each followed by drafts, so that the row has so many tokens."""
    if np.add.reduce(counts) == len(newest):
        return newest
    token_ids = np.full(int(np.add.reduce(counts)), NO_ID, np.int32)
    token_ids[np.cumsum(counts) - counts] = newest
    return token_ids
