"""A request while the core has it: from what was asked, to how it has ended."""

from dataclasses import dataclass

from ...common.errors import LaminaError
from ..protocol.engine_output import Finish
from ..protocol.engine_request import EngineRequest
from ..scheduler.request import Request


@dataclass(slots=True)
class Live:
    """A request that has not ended, and how many of its output tokens were sent."""

    request: Request
    num_sent: int = 0


def request_of(asked: EngineRequest) -> Request:
    """The scheduler's own of a request, with nothing computed."""
    return Request(
        request_id=asked.request_id,
        prompt_token_ids=asked.prompt_token_ids,
        params=asked.params,
        stop_token_ids=asked.stop_token_ids,
        max_total_tokens=asked.max_total_tokens,
        priority=asked.priority,
        timeout=asked.timeout,
        cache_salt=asked.block_salt,
        adapter=asked.adapter,
        grammar=asked.grammar,
        pooling=asked.pooling,
        is_counted=asked.is_counted,
    )


def finish_of(request: Request, error: LaminaError | None) -> Finish:
    """How a request has ended, and by which error."""
    assert request.finish_reason is not None
    return Finish(
        reason=request.finish_reason,
        stop_reason=request.stop_reason,
        times=request.times,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        error=error,
    )


def seconds_to_first_token(request: Request) -> float | None:
    """From its arrival, once it has one."""
    queued, first_token = request.times.queued, request.times.first_token
    return None if queued is None or first_token is None else first_token - queued
