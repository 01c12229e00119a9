"""How a caller wants a request served: its priority, its time, and with whom it shares blocks."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from ..common.errors import UnknownParameterError
from ..common.names import refuse_unknown
from .other_names import beside_sampling
from .sampling_params import SamplingParams
from .validation import integer, number, text

MAX_PRIORITY = 2**31  # in hours of waiting, as floats hold it to the second


@refuse_unknown(UnknownParameterError, beside_sampling(each.name for each in fields(SamplingParams)))
@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """How a request is served, whatever it samples."""

    priority: int = 0
    """Lower is served first; one step of it outweighs an hour of waiting, so that nobody waits for ever."""
    timeout: float | None = None
    """Seconds from now after which the request ends with what it has."""
    cache_salt: str = ""
    """Only requests of the same salt share blocks of the KV cache, so that nobody learns from the time taken
    what others asked."""
    adapter: str | None = None
    """The name of a LoRA adapter that was loaded: the model answers as it was fine-tuned so."""

    def __post_init__(self) -> None:
        for name, (left, check) in _CHECKS.items():
            value = getattr(self, name)
            if value is not left:
                object.__setattr__(self, name, check(value))  # in its stored form


# Of each field what it is where it is left open, and what any other value becomes.
_CHECKS: dict[str, tuple[object, Callable[[Any], object]]] = {
    "priority": (
        0,
        partial(
            integer,
            "priority",
            wanted=f"-{MAX_PRIORITY} to {MAX_PRIORITY}, lower first",
            low=-MAX_PRIORITY,
            high=MAX_PRIORITY,
            optional=False,
        ),
    ),
    "timeout": (None, partial(number, "timeout", wanted="of seconds, above 0", zero=False)),
    "cache_salt": ("", partial(text, "cache_salt")),
    "adapter": (None, partial(text, "adapter")),
}
