"""How many draft tokens a step computes of each request: as many as pay, by how many of them held so far."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..protocol.runner_output import RunnerOutput
from ..protocol.scheduler_output import DRAFTS_ON_HOST, NO_DRAFTS, Drafts, Flags, Ints
from ..speculation.config import draft_lengths
from .config import SchedulerConfig
from .in_flight import Launched
from .running_batch import RunningBatch

MOST_OF_LEFT = 2  # drafts get at most one part in so many of the tokens that a step has left


class Drafting:
    """Chooses the number of drafts of each step, the same for all rows, and learns from what became of them.

    A step of n tokens takes 1 + token_cost * n of some time. Of a row whose drafts hold with probability p,
    k drafts are worth p + p² + … + p^k tokens. The k with the most tokens a time is taken, or 0.
    """

    def __init__(self, config: SchedulerConfig, batch: RunningBatch) -> None:
        self._config, self._batch = config, batch
        self._lengths = draft_lengths(config.max_drafts)
        self._k = 0  # drafts of each row that the next step is to have
        self.num_drafted = 0  # drafts so far that were computed
        self.num_accepted = 0  # of them, those that held
        self.accepted_at = np.zeros(config.max_drafts, np.int64)  # by place among the drafts of a row
        self.num_drafting_rows = 0  # rows of steps so far that had drafts

    @property
    def is_on(self) -> bool:
        """Whether anybody drafts."""
        return self._config.max_drafts > 0

    def stats(self) -> dict[str, Any]:
        """Counts so far: rows of steps that had drafts, drafts, and those that held, in all and by place."""
        return {
            "drafts": self.num_drafting_rows,
            "draft_tokens": self.num_drafted,
            "accepted_tokens": self.num_accepted,
            "accepted_by_place": self.accepted_at.tolist(),
        }

    def each(self, counts: Ints, *, is_full: bool) -> Ints | None:
        """Drafts to compute of each row beside so many tokens; None for none at all.

        is_full: whether nobody is to be admitted. Then all rows get equally many, if all decode, since such
        steps are captured: those without drafts get fillers.
        """
        num, drafts, advancing = len(counts), self._batch.drafts, counts > 0
        # Of a pipeline the step before had other rows.
        best = self._best(num, advancing) if self._config.num_batches > 1 else self._k
        if not best or not num:
            return None
        drafting = self._may_draft(num) & (counts == 1)
        wanted = min(best, int(drafts.useful(num)[drafting].max(initial=0)))
        if wanted <= 0:
            return None
        k = min(min(length for length in self._lengths if length >= wanted), best)
        is_uniform = is_full and (self._batch.uncomputed()[advancing] == 1).all()
        each: Ints = np.where(advancing if is_uniform else drafting, k, 0)
        left = self._config.max_num_batched_tokens - int(counts.sum())
        num_samples = int(np.count_nonzero(counts)) + int(each.sum())
        fits = each.sum() * MOST_OF_LEFT <= left and num_samples <= self._config.most_samples
        return each if fits else None

    def drafts(self, num_sampled: Ints, block_size: int) -> Drafts | None:
        """What a step of so many samples of each row is told of drafts; None where nobody drafts.

        A step that has drafts leaves others, whatever is best, so that fewer kinds of steps are captured.
        """
        if not self.is_on:
            return None
        num, drafts = len(num_sampled), self._batch.drafts
        drafting = num_sampled > 1
        if drafting.any():
            drafting &= self._may_draft(num)
        self._k = self._best(num)
        return Drafts(
            sources=np.where(drafting, drafts.sources(num), NO_DRAFTS),
            capacities=drafts.capacities(num, block_size),
            limits=drafts.limits(num),
            num_next=self._config.max_drafts if self._k or drafting.any() else 0,
        )

    def put(self, token_ids: NDArray[np.int32], counts: Ints, num_sampled: Ints, drafts: Drafts) -> None:
        """Write the drafts that the host knows among a step's tokens, so many of each row."""
        rows = (drafts.sources == DRAFTS_ON_HOST).nonzero()[0]
        if len(rows):
            num_drafts = num_sampled[rows] - 1
            self._batch.drafts.put(token_ids, rows, np.cumsum(counts)[rows] - num_drafts, num_drafts)

    def learn(self, launched: Launched, num_yielded: Ints, output: RunnerOutput) -> None:
        """A step is over, whose output says how many of its drafts were no fillers, and what it proposed."""
        plan, num_drafted = launched.plan, output.num_drafted
        if plan.drafts is None or output.num_proposed is None:
            return
        if num_drafted is not None:
            accepted = np.minimum(num_yielded - 1, num_drafted).clip(0)
            self._count(accepted, num_drafted)
            tried = (plan.drafts.sources != NO_DRAFTS) & (plan.num_sampled_tokens > 1)
            shares = accepted / np.maximum(accepted + (accepted < num_drafted), 1)
            self._batch.drafts.move_hold_rates(launched, tried, shares)
        self._batch.drafts.learn(launched, output)

    def _count(self, accepted: Ints, drafted: Ints) -> None:
        self.num_drafting_rows += int(np.count_nonzero(drafted))
        self.num_drafted += int(drafted.sum())
        self.num_accepted += int(accepted.sum())
        self.accepted_at += (accepted[:, None] > np.arange(len(self.accepted_at))).sum(axis=0)

    def _may_draft(self, num: int) -> Flags:
        return self._batch.drafts.have_drafts(num) & ~self._batch.sampling.need_exact_counts(num)

    def _best(self, num: int, among: Flags | slice = slice(None)) -> int:
        """The number of drafts of each of so many rows, or of some, that gives the most tokens a time."""
        rates = self._batch.drafts.hold_rates(num)
        held = np.where(self._batch.sampling.need_exact_counts(num), 0, rates)[among]
        num_rows, cost = len(held), self._config.token_cost
        if not num_rows:
            return 0
        places = np.arange(1, self._lengths[0] + 1)
        worth = np.cumsum((held[:, None] ** places).mean(axis=0)).tolist()  # of so many drafts, in tokens
        best, most = 0, 1 / (1 + cost * num_rows)
        for k in self._lengths:
            if num_rows * (1 + k) > self._config.most_samples:
                continue
            rate = (1 + worth[k - 1]) / (1 + cost * num_rows * (1 + k))
            if rate > most:
                best, most = k, rate
        return best
