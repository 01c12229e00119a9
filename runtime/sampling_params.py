"""What a caller asks of the choice of tokens, and of where they end: checked when given."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..common.errors import RequestError
from .border import as_int, check_flag, integer, iterate, number

SEED_LIMIT = 2**63  # seeds travel to the device as int64


class SamplingDefaults(Protocol):
    """A model's own sampling settings, used where a request leaves them open."""

    @property
    def temperature(self) -> float | None: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def min_p(self) -> float | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop; None leaves a choice to the model's defaults.

    temperature 0 is greedy; top_k 0 or -1 is off. max_tokens is a ceiling: where the context ends sooner, so
    does the answer. Until min_tokens have come, ids that stop are not sampled, stop strings not looked for.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool | None = None

    def __post_init__(self) -> None:
        self._settle("max_tokens", integer("max_tokens", self.max_tokens, "at least 1", low=1))
        self._settle("min_tokens", integer("min_tokens", self.min_tokens, "0 or more", low=0, optional=False))
        self._settle("temperature", number("temperature", self.temperature, "0 (greedy) or more"))
        self._settle("top_k", integer("top_k", self.top_k, "at least 1, or 0 for off", low=-1))
        self._settle("top_p", number("top_p", self.top_p, "above 0, at most 1", high=1.0, zero=False))
        self._settle("min_p", number("min_p", self.min_p, "0 to 1", high=1.0))
        self._settle("seed", integer("seed", self.seed, "a 64-bit one", low=-SEED_LIMIT, high=SEED_LIMIT - 1))
        self._settle("stop", _stop_strings(self.stop))
        self._settle("stop_token_ids", _stop_ids(self.stop_token_ids))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_flag(name, getattr(self, name))
        if self.detokenize is not None:
            check_flag("detokenize", self.detokenize)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}; lower it"
            )

    def resolve(self, defaults: SamplingDefaults | None, *, seed: int) -> "SamplingParams":
        """With nothing left open: the request's own value, else the model's default, else the neutral one."""

        def choose(name: str, neutral: float) -> Any:
            own, model = getattr(self, name), getattr(defaults, name, None)
            return next(value for value in (own, model, neutral) if value is not None)

        return dataclasses.replace(
            self,
            temperature=choose("temperature", 1.0),
            top_k=choose("top_k", 0),
            top_p=choose("top_p", 1.0),
            min_p=choose("min_p", 0.0),
            seed=seed if self.seed is None else self.seed,
        )

    def _settle(self, name: str, value: object) -> None:
        object.__setattr__(
            self, name, value
        )  # only while being built: a checked value in its one stored form


def stopping_token_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """The ids that end a request: the caller's own, and every EOS unless ignore_eos."""
    own = params.stop_token_ids or ()
    return frozenset(own if params.ignore_eos else (*own, *eos_token_ids))


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(() if stop is None else iterate("stop", stop))
    for string in strings:
        if not isinstance(string, str) or not string:
            raise RequestError(f"stop holds {string!r}; wanted non-empty strings, or stop=None for none")
    return strings


def _stop_ids(ids: Any) -> tuple[int, ...]:
    plain = []
    for value in () if ids is None else iterate("stop_token_ids", ids):
        id_ = as_int(value)
        if id_ is None or id_ < 0:
            raise RequestError(f"stop_token_ids holds {value!r}; wanted token ids, 0 or more")
        plain.append(id_)
    return tuple(plain)
