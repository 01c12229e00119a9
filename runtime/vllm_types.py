"""What callers of vLLM give and get: names, defaults and shapes of vLLM 0.23, checked by our own rules."""

import copy
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from ..common.errors import RequestError, UnsupportedError, shown
from .engine import beam_search
from .engine import outputs as ours
from .engine.logprobs import Logprobs
from .sampling_params import MAX_BAD_WORDS, MAX_STOPS
from .sampling_params import SamplingParams as OurParams
from .structured_outputs import StructuredOutputs, kinds_in
from .validation import items, text, token_ids

GREEDY_BELOW = 1e-5
MOST_READ = 1 << 20  # items of what has no length
LOWEST_TEMPERATURE = 0.01  # of those that are not greedy
# Parameters that vLLM has and we cannot honour, with the value that asks for nothing.
WITHOUT: dict[str, Any] = {
    "guided_decoding": None,
    "logprob_token_ids": None,
    "flat_logprobs": False,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "extra_args": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
}


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str | None]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str | None]
    cache_salt: NotRequired[str | None]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt


class RequestOutputKind(enum.Enum):
    """How a stream would be cut; whole answers are given whatever it says."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class StructuredOutputsParams:
    """vLLM's form of an answer: one of the first five."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def to_lamina(self) -> StructuredOutputs:
        """Returns ours; an error names what cannot be honoured."""
        for name in ("disable_additional_properties", "whitespace_pattern", "structural_tag"):
            if value := getattr(self, name):
                raise UnsupportedError(f"{name} is {shown(value)}; Lamina has no such thing")
        return StructuredOutputs(**kinds_in(self), compact=self.disable_any_whitespace)


@dataclass
class SamplingParams:
    """vLLM's parameters with vLLM's defaults: 16 tokens, drawn as the model says. May be changed, cloned."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None  # a text or a list of texts; a list from then on
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: Any = None
    logprob_token_ids: Any = None
    flat_logprobs: bool = False
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Any = None
    extra_args: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else items("stop", self.stop, MAX_STOPS)
        self.stop_token_ids = [
            *dict.fromkeys(token_ids("stop_token_ids", self.stop_token_ids, MAX_STOPS)),
        ]
        words = items("bad_words", self.bad_words, MAX_BAD_WORDS)
        self.bad_words = [*dict.fromkeys(text("bad_words", word, verb="holds") for word in words)]
        self.seed = None if self.seed == -1 else self.seed
        self.logprobs = 1 if self.logprobs is True else self.logprobs
        self.prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs
        self.to_lamina()
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            self.temperature = LOWEST_TEMPERATURE
        if self.temperature < GREEDY_BELOW:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
            if self.n > 1:
                raise RequestError(f"n is {self.n} and temperature 0; wanted n 1, as all would be the same")

    @staticmethod
    def from_optional(**given: Any) -> "SamplingParams":
        """Returns parameters in which None stands for the default."""
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def clone(self) -> "SamplingParams":
        """Returns a copy that shares nothing."""
        return copy.deepcopy(self)

    def to_lamina(self) -> OurParams:
        """Returns ours, with nothing left to the checkpoint; an error names what cannot be honoured."""
        for name, nothing in WITHOUT.items():
            if getattr(self, name) != nothing:
                raise UnsupportedError(f"{name} is {shown(getattr(self, name))}; Lamina has no such thing")
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
            if getattr(self, name) is None:  # what leaves a choice to the checkpoint with us
                raise RequestError(f"{name} is None; wanted a number (from_optional() takes None)")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) == -1:
                raise UnsupportedError(f"{name} is -1, all tokens there are; give their number instead")
        return OurParams(
            n=self.n,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            typical_p=1.0,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            detokenize=self.detokenize,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logit_bias=self.logit_bias,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words,
            structured_outputs=_form(self.structured_outputs),
        )


def _form(given: Any) -> StructuredOutputs | None:
    if given is None:
        return None
    if isinstance(given, StructuredOutputsParams):
        return given.to_lamina()
    raise RequestError(f"structured_outputs is {shown(given)}; wanted a StructuredOutputsParams")


@dataclass
class BeamSearchParams:
    """vLLM's parameters of a beam search."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def to_lamina(self) -> beam_search.BeamSearchParams:
        """Returns ours."""
        if self.temperature != 0:
            raise UnsupportedError(
                f"temperature is {self.temperature}; a beam search here has none; wanted 0"
            )
        return beam_search.BeamSearchParams(
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
        )


@dataclass
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[Logprobs] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: None = None

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    @classmethod
    def of(cls, answer: ours.CompletionOutput) -> "CompletionOutput":
        """Returns one of ours as vLLM has it."""
        return cls(
            index=answer.index,
            text=answer.text,
            token_ids=list(answer.token_ids),
            cumulative_logprob=answer.cumulative_logprob,
            logprobs=None if answer.logprobs is None else list(answer.logprobs),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
        )


@dataclass
class RequestOutput:
    """A prompt with its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[Logprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: ours.RequestTimes | None = None
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    num_cached_tokens: int | None = None

    @classmethod
    def of(cls, output: ours.RequestOutput, prompt: str | None) -> "RequestOutput":
        """Returns one of ours as vLLM has it; a prompt given as token ids alone has no text."""
        logprobs = output.prompt_logprobs
        return cls(
            request_id=output.request_id,
            prompt=prompt,
            prompt_token_ids=list(output.prompt_token_ids),
            prompt_logprobs=None if logprobs is None else list(logprobs),
            outputs=[CompletionOutput.of(answer) for answer in output.outputs],
            finished=True,
            metrics=output.times,
            num_cached_tokens=output.num_cached_tokens,
        )


@dataclass
class BeamSearchSequence:
    """A sequence that was found: prompt and answer together, as tokens and as text."""

    tokens: list[int]
    logprobs: list[Logprobs]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: None = None


@dataclass
class BeamSearchOutput:
    """The sequences that were found for a prompt, the best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


def listed(name: str, values: Any) -> Sequence[Any]:
    """Returns a sequence as it is, anything else that can be read as a list; RequestError for others."""
    if values is None:
        raise RequestError(f"{name} is None; wanted a sequence")
    is_sequence = isinstance(values, Sequence) and not isinstance(values, (str, bytes, bytearray))
    return values if is_sequence else items(name, values, MOST_READ)  # what is too long is not copied


def each_prompt(prompts: Any) -> Sequence[Any]:
    """Returns one prompt or many as a sequence; integers are one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    found = listed("prompts", prompts)
    are_prompts = all(isinstance(each, (str, Mapping, Sequence)) for each in found)
    return found if are_prompts else [found]


def prompt_of(prompt: Any) -> tuple[Any, str | None, str]:
    """Returns what to serve, its text where it has one, and its cache salt; RequestError for no prompt."""
    if not isinstance(prompt, Mapping):
        return prompt, prompt if isinstance(prompt, str) else None, ""
    for name in prompt:
        if name not in ("prompt", "prompt_token_ids", "cache_salt"):
            raise UnsupportedError(
                f"a prompt holds {shown(name)}; wanted prompt, prompt_token_ids, cache_salt"
            )
    written, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if written is None and ids is None:
        raise RequestError(f"a prompt is {shown(dict(prompt))}; wanted prompt or prompt_token_ids in it")
    if not (written is None or isinstance(written, str)):
        raise RequestError(f"prompt is {shown(written)}; wanted text; token ids belong into prompt_token_ids")
    salt = prompt.get("cache_salt")
    served = written if ids is None else listed("prompt_token_ids", ids)
    return served, written, "" if salt is None else salt
