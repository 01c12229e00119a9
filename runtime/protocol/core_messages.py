"""What a core in a thread or process of its own is sent, and what it answers: plain data."""

from dataclasses import dataclass
from typing import Any

from ...common.errors import LaminaError
from .engine_output import EngineOutput, FinishReason
from .engine_request import EngineRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class AddRequests:
    """Queue these. One that cannot be queued is answered by an output that ends it with its error."""

    requests: tuple[EngineRequest, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AbortRequests:
    """End these wherever they stand; what is not live is passed over. Each is answered by its last output."""

    request_ids: tuple[str, ...]
    reason: FinishReason = "abort"
    stop_reason: int | str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Answer with what a named method returns, plain data; between two steps."""

    number: int
    method: str
    arguments: tuple[Any, ...] = ()
    engine: int | None = None  # of several engines the one that is asked; None: all of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Shutdown:
    """End every request, send their outputs, give everything back, and end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutputs:
    """All outputs since the message before: one message a step."""

    outputs: tuple[EngineOutput, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The answer to a Call of that number."""

    number: int
    value: Any = None
    error: LaminaError | None = None


Command = AddRequests | AbortRequests | Call | Shutdown
Message = StepOutputs | Reply


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreStatus:
    """Whether a core can step, as seen from outside of it, without asking it."""

    is_alive: bool
    reason: str | None = None  # why it is not alive, or cannot step
    num_steps: int = 0
    step_seconds: float | None = None  # how long the step that runs now has been running; None: none runs
    building: str | None = None  # what is being compiled or built in the middle of that step
    is_asleep: bool = False  # whether it waits to be woken, its device's memory given back
