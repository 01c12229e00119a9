"""The steps that were launched and whose tokens the host has not read."""

from collections import deque
from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from ..protocol.scheduler_output import NO_DRAFTS, Ints, SchedulerOutput
from .request import Request


@dataclass(frozen=True, slots=True)
class Launched:
    """A step, and whose its rows are."""

    plan: SchedulerOutput
    requests: list[Request]
    serials: Ints  # of the scheduler's rows, as they were
    foretold: set[Request] = field(default_factory=set)  # whose samples of it the host knows already

    def samplers(self) -> list[Request]:
        """The requests that it samples of, in order."""
        num_sampled = self.plan.num_sampled_tokens
        if np.count_nonzero(num_sampled) == len(self.requests):
            return self.requests
        return list(compress(self.requests, num_sampled.tolist()))

    def most_of(self, request: Request) -> int:
        """Tokens of a request that it samples of which it yields at most."""
        row, drafts = self.requests.index(request), self.plan.drafts
        are_fillers = drafts is None or drafts.sources[row] == NO_DRAFTS
        return 1 if are_fillers else int(self.plan.num_sampled_tokens[row])

    def owners(self, num_yielded: Ints) -> list[Request | None]:
        """Of each sample, in order, the request that got it; None where its row yielded fewer tokens."""
        rows = zip(self.requests, self.plan.num_sampled_tokens.tolist(), num_yielded.tolist(), strict=True)
        return [request if place < got else None for request, most, got in rows for place in range(most)]


class InFlight:
    """A queue of steps, numbered from 1: launched in order, over in the same order, undone from the end."""

    def __init__(self) -> None:
        self._steps: deque[Launched] = deque()
        self._last_over = 0
        self.num_launched = 0  # so far

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def next_step(self) -> int:
        """The number of the step to be launched next; none has it twice."""
        return self.num_launched + 1

    def launch(self, plan: SchedulerOutput, requests: list[Request], serials: Ints) -> None:
        """A step is in flight, with a row for each of these."""
        self.num_launched = plan.step
        self._steps.append(Launched(plan, requests, serials))

    def finish(self, plan: SchedulerOutput) -> Launched:
        """The oldest step is over; returns it."""
        assert len(self) > 0, "no step is in flight"
        assert self._steps[0].plan is plan, "not the oldest step in flight"
        self._last_over = plan.step
        return self._steps.popleft()

    def undo(self, plan: SchedulerOutput) -> dict[Request, int]:
        """Forget a step and all after it; returns how many tokens their requests had computed before."""
        assert any(launched.plan is plan for launched in self._steps), "not a step in flight"
        computed: dict[Request, int] = {}
        while self._steps and self._steps[-1].plan.step >= plan.step:
            undone = self._steps.pop()
            computed |= dict(zip(undone.requests, undone.plan.num_computed_tokens.tolist(), strict=True))
        return computed

    def clear(self, num_launched: int = 0) -> None:
        """No step is in flight, whatever became of those that were, so many or more."""
        self._steps.clear()
        self.num_launched = max(self.num_launched, num_launched)
        self._last_over = self.num_launched

    def is_over(self, step: int) -> bool:
        """Whether a step, 0 for none, can write no more."""
        return step <= self._last_over

    def last_step(self, request: Request) -> int:
        """The last step with a row for a request, 0 for none."""
        steps = (launched.plan.step for launched in self._steps if request in launched.requests)
        return max(steps, default=0)

    def num_tokens(self, request: Request) -> int:
        """Tokens of a request that are in flight for certain: one of each step that samples it.

        But for those that the host knows already.
        """
        return sum(self._is_awaited(request, launched) for launched in self._steps)

    def foretell(self, request: Request, count: int) -> None:
        """The host knows the next so many tokens of a request, whatever step in flight samples them.

        Where one of them may yield several, these are all that there are.
        """
        awaited = [launched for launched in self._steps if self._is_awaited(request, launched)]
        for launched in awaited[:count]:
            launched.foretold.add(request)

    def may_foretell(self, request: Request, count: int) -> bool:
        """Whether it is known of every step in flight which of its tokens are among the next so many."""
        most = [launched.most_of(request) for launched in self._steps if self._is_awaited(request, launched)]
        return sum(most) == len(most) or sum(most) <= count

    def _is_awaited(self, request: Request, launched: Launched) -> bool:
        return request in launched.samplers() and request not in launched.foretold
