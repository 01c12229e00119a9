"""Requests whose logits are not finite: which of a step they are, and in what words they end."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...common.errors import LogitsError
from ...custom_ops.top_logprobs.reference import BROKEN_RANK
from ..protocol.scheduler_output import SchedulerOutput


def failed_samples(plan: SchedulerOutput, token_ids: NDArray[np.int32]) -> dict[str, LogitsError]:
    """By request id what ends those that lamina::sample found no token for: it gave -1."""
    if token_ids.min(initial=0) >= 0:
        return {}
    broken = np.flatnonzero(token_ids < 0)
    rows, excluding = plan.sample_rows[broken], _excluding_samples(plan)
    return {
        plan.request_ids[row]: _error(sample in excluding)
        for row, sample in zip(rows.tolist(), broken.tolist(), strict=True)
    }


def failed_prompts(plan: SchedulerOutput, ranks: Tensor) -> dict[str, LogitsError]:
    """Likewise those with a token of the prompt whose log-probability is no number; ranks: of all these."""
    assert plan.wanted_logprobs is not None
    is_broken = (ranks == BROKEN_RANK).numpy()
    if not is_broken.any():
        return {}
    rows = np.repeat(*np.array(plan.wanted_logprobs.spans, np.int64).T)
    return {plan.request_ids[row]: _error(False) for row in set(rows[is_broken].tolist())}


def _excluding_samples(plan: SchedulerOutput) -> set[int]:
    """Samples of requests that may have excluded tokens."""
    adjusted = () if plan.adjusted is None else plan.adjusted.samples.tolist()
    return {*adjusted, *(sample for sample, _ in plan.banned)}


def _error(may_exclude_all: bool) -> LogitsError:
    other = ", or what the request excludes leaves no token" if may_exclude_all else ""
    return LogitsError(
        f"the logits are not finite (NaN or infinity){other}, so no token can be chosen; "
        "`lamina verify` names the layer that they come from"
    )
