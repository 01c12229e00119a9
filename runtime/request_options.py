"""How a caller wants a request served: its priority, its time, and with whom it shares blocks."""

from dataclasses import dataclass, fields

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
        wanted = f"-{MAX_PRIORITY} to {MAX_PRIORITY}, lower first"
        low, high = -MAX_PRIORITY, MAX_PRIORITY
        checked: dict[str, object] = {
            "priority": integer("priority", self.priority, wanted, low=low, high=high, optional=False),
            "timeout": number("timeout", self.timeout, "of seconds, above 0", zero=False),
            "cache_salt": text("cache_salt", self.cache_salt),
            "adapter": None if self.adapter is None else text("adapter", self.adapter),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # in its stored form
