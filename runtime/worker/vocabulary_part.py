"""The likeliest ids of a vocabulary that ranks share out, without the logits of other ranks."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...custom_ops.all_reduce.group import Group
from ...custom_ops.sample.reference import BROKEN

Logits = Callable[[Tensor], Tensor]  # hidden [n, H] -> [n, ids of this rank]


class VocabularyPart:
    """Chooses greedily among all ids: of each row every rank tells one logit and one id, 16 bytes.

    What it chooses is what lamina::sample chooses of whole rows: the lowest id among the largest logits, or
    BROKEN. It has the same bits on every rank.
    """

    def __init__(self, logits: Logits, group: Group, *, num_own_ids: int, num_valid_ids: int) -> None:
        """logits: of so many ids of this rank, as of every other. num_valid_ids: of all ranks together."""
        self._logits, self._group = logits, group
        self._num_own_ids, self._first = num_own_ids, group.rank * num_own_ids
        self._num_valid = min(max(num_valid_ids - self._first, 0), num_own_ids)

    def choose(self, hidden: Tensor, banned: Tensor, out: Tensor) -> None:
        """Write the ids [n] int32 that are chosen for hidden states [n, H].

        banned [n, any number] int32: ids of the vocabulary never to be chosen; others mean nothing.
        """
        own = self._logits(hidden)
        assert own.shape[1] == self._num_own_ids, f"{own.shape[1]} ids of {self._num_own_ids}"
        own[:, self._num_valid :] = float("-inf")
        ban(own, banned - self._first)
        largest, ids = own.max(dim=1)
        winners = torch.stack((largest.double(), (ids + self._first).double()), dim=1).unsqueeze(0)
        winners = self._group.all_gather(winners, 0)  # [ranks, n, 2]
        largest, rank = winners[:, :, 0].max(dim=0)  # the first of equals, whose ids are the lowest
        chosen = winners[:, :, 1].gather(0, rank.unsqueeze(0)).squeeze(0)
        out.copy_(torch.where(largest.isfinite(), chosen, BROKEN))


def ban(logits: Tensor, banned: Tensor) -> None:
    """Write -inf at banned ids of logits [n, ids], which [n, any number] may hold others than there are.

    NaN and infinity stay: a ban is not to hide that a row is broken.
    """
    if not banned.shape[1]:
        return
    is_id = (banned >= 0) & (banned < logits.shape[1])
    ids = torch.where(is_id, banned, 0).long()
    is_banned = is_id & (logits.gather(1, ids) < float("inf"))
    least = torch.where(is_banned, float("-inf"), float("inf")).to(logits.dtype)
    logits.scatter_reduce_(1, ids, least, "amin")
