"""A step that was launched: its tokens, once they are there, and those of the rows of the step after it."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...common.errors import LaminaError
from ..protocol.runner_output import RunnerOutput
from ..protocol.scheduler_output import (
    DRAFTS_ON_HOST,
    NO_DRAFTS,
    ON_HOST,
    Constrained,
    Flags,
    Ints,
    SchedulerOutput,
)
from .broken_logits import failed_prompts, failed_samples
from .grammar_masks import Failure, GrammarMasks
from .pooler import finished
from .stage_link import EarlierStageFailedError
from .step_results import StepResults


class LaunchedStep:
    """A step that was launched; its tokens are read when they are needed."""

    def __init__(
        self,
        plan: SchedulerOutput,
        results: StepResults,
        failures: Mapping[str, Failure],
        grammars: GrammarMasks,
        constrained: Sequence[Constrained] = (),
    ) -> None:
        """results: on the device, from where they are in flight from now on. constrained: samples with a
        grammar, where they stood."""
        self._plan, self._failures = plan, failures
        self._grammars, self._constrained = grammars, constrained
        self._found, self._arrived = results.in_flight()
        self._after_read: Callable[[], None] | None = None

    def when_there(self, call: Callable[[], None]) -> None:
        """Have a call made at the end of read(), or now where the device has computed the step."""
        if self.is_done:
            call()
        else:
            self._after_read = call

    def settle(self) -> None:
        """Launch what of it is not launched: nothing."""

    def launched(self) -> "LaunchedStep":
        """Itself; see DeferredStep."""
        return self

    @property
    def is_done(self) -> bool:
        """Whether the device has computed it."""
        return self._arrived is None or bool(self._arrived.query())

    def token_ids(self) -> NDArray[np.int32]:
        """Its samples, waiting for the device where it is still at work."""
        if self._arrived is not None:
            self._arrived.synchronize()
        token_ids: NDArray[np.int32] = self._found.sampled.numpy()
        return token_ids

    def newest(self) -> list[int]:
        """The newest token of each row, any id where a row sampled none; waits likewise."""
        num_sampled, token_ids = self._plan.num_sampled_tokens, self.token_ids()
        if not len(token_ids):
            return [0] * len(num_sampled)
        firsts = np.cumsum(num_sampled) - num_sampled
        newest: list[int] = token_ids[(firsts + self._accepted).clip(max=len(token_ids) - 1)].tolist()
        return newest

    def left(self, row: int) -> tuple[int, list[int]]:
        """How many tokens of a row are computed, and the drafts after its newest; waits likewise."""
        assert self._found.left is not None, "a row with a grammar after a step without any"
        self.token_ids()
        num_computed, *drafts = self._found.left[row].tolist()
        return num_computed, [*_drafts_of(drafts)]

    @property
    def _accepted(self) -> Ints:
        """How many drafts of each row hold [rows], once they are there."""
        if self._found.verdict is None:
            return np.zeros(self._plan.num_rows, np.int64)
        return self._found.verdict[0].numpy().astype(np.int64)

    def read(self) -> RunnerOutput:
        """What the step came to, waiting for the device where it is still at work.

        A token of a request that failed means nothing. EarlierStageFailedError where a stage before failed.
        """
        output = self._read()
        call, self._after_read = self._after_read, None
        if call is not None:
            call()
        return output

    def _read(self) -> RunnerOutput:
        token_ids, found = self.token_ids(), self._found
        if found.failure is not None and found.failure.item():
            raise EarlierStageFailedError("a stage before failed at this step")
        num_sampled = self._plan.num_sampled_tokens
        pooled, unpooled = self._results(token_ids)
        accepted, drafted, proposed = (None,) * 3 if found.verdict is None else found.verdict.numpy()
        holds = None
        if accepted is not None and len(token_ids) > np.count_nonzero(num_sampled):
            num_sampled = np.where(num_sampled > 0, 1 + accepted, 0).astype(np.int64)
            holds = _first_of_each(self._plan.num_sampled_tokens, num_sampled)
        return RunnerOutput(
            token_ids=token_ids if holds is None else token_ids[holds],
            num_sampled=None if holds is None else num_sampled,
            num_drafted=None if holds is None or drafted is None else drafted.astype(np.int64),
            num_proposed=None if proposed is None else proposed.astype(np.int64),
            draft_ids=None if found.left is None else found.left[:, 1:].numpy().reshape(-1),
            logprobs=None if found.logprobs is None else found.logprobs.read(),
            pooled=pooled,
            failures={
                **unpooled,
                **self._all_failures(token_ids if holds is None else np.where(holds, token_ids, 0)),
            },
            forced=self._forced(token_ids),
        )

    def _results(self, token_ids: NDArray[np.int32]) -> tuple[dict[str, bytes], dict[str, LaminaError]]:
        """Results of prompts that end, and errors of those without; the tokens in their places are 0 then."""
        wanted = self._plan.pooling
        if wanted is None or self._found.pooled is None:
            return {}, {}
        firsts = np.cumsum(self._plan.num_sampled_tokens) - 1
        token_ids[firsts[wanted.rows[wanted.are_last]]] = 0
        pooled, failures = finished(self._plan, wanted, self._found.pooled.numpy())
        return pooled, {**failures}

    def _forced(self, token_ids: NDArray[np.int32]) -> Mapping[str, tuple[int, ...]]:
        adjusted = self._plan.adjusted
        if adjusted is None or not self._constrained:
            return {}
        held = self._accepted[[one.row for one in self._constrained]]
        which = adjusted.samples[[one.which for one in self._constrained]] + held
        newest = [
            one._replace(num_output=one.num_output + count)
            for one, count in zip(self._constrained, held.tolist(), strict=True)
        ]
        return self._grammars.forced(newest, token_ids[which].tolist())

    def _all_failures(self, token_ids: NDArray[np.int32]) -> Mapping[str, LaminaError]:
        failures: dict[str, LaminaError] = {**failed_samples(self._plan, token_ids)}
        for request_id, failure in self._failures.items():
            if failure.num_drafts <= self._accepted[self._plan.request_ids.index(request_id)]:
                failures[request_id] = failure.error
        if self._found.logprobs is not None and self._found.logprobs.prompts:
            failures |= failed_prompts(self._plan, self._found.logprobs.prompts[-1])
        return failures


class SampledStep(Protocol):
    """What is asked of the step before by the one after it; see LaunchedStep."""

    def newest(self) -> list[int]: ...
    def left(self, row: int) -> tuple[int, list[int]]: ...


class NewestTokens:
    """The newest tokens of a plan's constrained rows; those that the step before samples are read at once."""

    def __init__(self, plan: SchedulerOutput, last: SampledStep | None) -> None:
        """last: the step before, if there was any."""
        self._plan, self._last = plan, last
        self._ends: Ints = np.cumsum(plan.num_scheduled_tokens) - (plan.num_sampled_tokens - 1).clip(0)
        self._sources: list[int] = plan.sources.tolist()
        self._sampled: list[int] | None = None  # of each row of that step, once they were asked for

    def placed(self, one: Constrained) -> Constrained:
        """Where a sample stands, and the drafts after it; waits for the step before where that decides."""
        plan, last = self._plan, self._last
        if plan.drafts is None:
            return one
        if last is not None and (source := self._sources[one.row]) != ON_HOST:
            ahead = last.left(source)[0] - int(plan.num_computed_tokens[one.row])
            one = one._replace(num_output=one.num_output + ahead)
        num_drafts = int(plan.num_sampled_tokens[one.row]) - 1
        if not num_drafts or (source := int(plan.drafts.sources[one.row])) == NO_DRAFTS:
            return one
        if source == DRAFTS_ON_HOST:
            first = int(self._ends[one.row])
            return one._replace(drafts=_drafts_of(plan.token_ids[first : first + num_drafts].tolist()))
        return one if last is None else one._replace(drafts=tuple(last.left(source)[1][:num_drafts]))

    def __call__(self, one: Constrained, count: int) -> Sequence[int]:
        """The last tokens of a row, so many; waits for the step before where one is its sample."""
        source = self._sources[one.row]
        if count == 1 and source != ON_HOST:
            return (self._newest(source),)
        end = int(self._ends[one.row])
        assert count <= self._plan.num_scheduled_tokens[one.row], "a grammar has missed tokens"
        tokens: list[int] = self._plan.token_ids[end - count : end].tolist()
        if source != ON_HOST:
            tokens[-1] = self._newest(source)
        return tokens

    def _newest(self, row: int) -> int:
        if self._sampled is None:
            assert self._last is not None, "a token of a step that never was"
            self._sampled = self._last.newest()
        return self._sampled[row]


def _drafts_of(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Of a row's drafts those before the first that there is none of."""
    return tuple(itertools.takewhile(lambda draft: draft >= 0, token_ids))


def _first_of_each(num_sampled: Ints, num_kept: Ints) -> Flags:
    """Which samples are among the first so many of their row, [samples]."""
    places = np.arange(int(num_sampled.sum())) - np.repeat(np.cumsum(num_sampled) - num_sampled, num_sampled)
    kept: Flags = places < np.repeat(num_kept, num_sampled)
    return kept
