"""Requests that want a result of their prompts in place of tokens: which rows a step pools."""

from collections.abc import Mapping

import numpy as np

from ..protocol.scheduler_output import Ints, SchedulerOutput, WantedPooling
from .live_requests import LiveRequests
from .running_batch import RunningBatch


def wanted_pooling(batch: RunningBatch, num_sampled: Ints) -> WantedPooling | None:
    """What a step of so many samples of the first rows pools; None where none of them wants that."""
    rows = np.array([row for row in batch.sampling.poolers if row < len(num_sampled)], np.int64)
    if not len(rows):
        return None
    pooling = [batch.requests[row].pooling for row in rows.tolist()]
    return WantedPooling(
        rows=rows,
        are_last=num_sampled[rows] > 0,
        params=tuple(params for params in pooling if params is not None),
    )


def take_in_pooled(plan: SchedulerOutput, pooled: Mapping[str, bytes], live: LiveRequests) -> None:
    """Give each live request whose prompt has ended its result."""
    assert plan.pooling is not None, "a step that pools nothing"
    for row in plan.pooling.rows[plan.pooling.are_last].tolist():
        request = live.get(plan.request_ids[row])
        if request is not None and request.finish_reason is None:
            request.report_pooled(pooled.get(request.request_id))
