"""What an executor and workers in processes of their own say to each other: plain data."""

from dataclasses import dataclass
from typing import Any

from ...common.errors import LaminaError
from .plain_data import PlainData
from .runner_output import RunnerOutput
from .scheduler_output import SchedulerOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class StartWorker:
    """The first message to a worker: what to load, and which part of it is its own."""

    config: bytes  # a RuntimeConfig, pickled, as it holds what callers hold
    log_level: int
    num_threads: int  # of its own, on a CPU


class ExecuteStep(PlainData, frozen=True, kw_only=True):
    """Run a step after those before, unless one of them has failed that whoever sent this did not know of."""

    number: int
    known_failure: int  # the last step sent before a failure was known, which undid it too; 0 for none
    plan: SchedulerOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class AddGrammar:
    """Know a request's grammar, before any plan names the request."""

    request_id: str
    grammar: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoveRequest:
    """Let go of what is known of a request."""

    request_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CallWorker:
    """Answer with what a fact or a public method of the runner returns, plain data; between two steps."""

    number: int
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReady:
    """A worker has loaded its part. Ranks fit together where their `decisions` are the same."""

    num_kv_blocks: int
    swap_bytes: int
    attention: str
    gemm_kernels: tuple[str, ...]
    decisions: dict[str, str]
    seconds: dict[str, float]  # of its start, by stage
    overlapped: dict[str, float]


class StepDone(PlainData, frozen=True, kw_only=True):
    """What a step came to: from the rank that answers, and from another where it failed there."""

    number: int
    output: RunnerOutput
    traceback: str = ""  # of its error, as the rank saw it
    is_passed_on: bool = False  # whether it failed in an earlier stage


@dataclass(frozen=True, kw_only=True, slots=True)
class CallDone:
    """The answer to a CallWorker of that number."""

    number: int
    value: Any = None
    error: LaminaError | None = None
    traceback: str = ""
