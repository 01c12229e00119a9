"""What requests for text have in common: how tokens are chosen, where answers end, how they are sent."""

import re
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from ...common.errors import RequestError, shown
from ...runtime.request_options import RequestOptions
from ...runtime.sampling_params import SamplingParams
from ...runtime.structured_outputs import StructuredOutputs
from ..config import ServeConfig
from ..errors import ApiError
from .decoding import Body, placed, wrong
from .forms import FIELDS, OLDER, ResponseFormat, StructuredOutputsField, form_of
from .unserved import ACCEPTED

if TYPE_CHECKING:
    from ...runtime.engine.input_processor import InputProcessor

NAMED = re.compile(r"(?P<name>\w+)(\[.*?\])? (is|holds) ")  # how the library begins what it says of a field
NonNegative = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
SAME = (  # fields that SamplingParams has under the same name
    *("n", "best_of", "temperature", "top_k", "top_p", "min_p", "typical_p", "min_tokens", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids"),
    *("bad_words", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
    "skip_special_tokens",
)


class StreamOptions(msgspec.Struct, kw_only=True, frozen=True):
    """What a stream tells beside the text."""

    include_usage: bool = False
    """Whether the last chunk has the usage and no choices."""
    continuous_usage_stats: bool = False
    """Whether every chunk has the usage so far."""
    include_timing: bool = False
    """Whether the last chunk, without choices, has the milliseconds that each phase of the request took."""
    include_obfuscation: bool = False
    """Taken and ignored: chunks are not padded."""


class GenerationRequest(Body, kw_only=True, frozen=True):
    """A request for text; what is left open is the checkpoint's own choice, as generation_config.json has it.

    Field by field as SamplingParams and RequestOptions, which docs/sampling.md explains.
    """

    accepted: ClassVar[frozenset[str]] = ACCEPTED
    large: ClassVar[frozenset[str]] = frozenset(("messages", "prompt", "allowed_token_ids", *FIELDS))

    n: Positive = 1
    best_of: Positive | None = None
    max_tokens: NonNegative | None = None
    min_tokens: NonNegative = 0
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    allowed_token_ids: list[NonNegative] | None = None
    bad_words: list[str] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[NonNegative] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: NonNegative | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """So many last tokens of a prompt are kept, -1 for as many as fit."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    stream_interval: Positive = 1
    """Tokens of an answer that a chunk of the stream holds at least, but for the first and the last."""
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """Whether tokens in log-probabilities are named token_id:5 in place of their text."""
    priority: int = 0
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    request_id: Annotated[str, Meta(pattern=r"^[!-~]{1,128}(?!\n)$")] | None = None

    @property
    def include_usage(self) -> bool:
        """Whether the last chunk of the stream is to have the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def include_timing(self) -> bool:
        """Whether the last chunk of the stream is to have the time that each phase took."""
        return self.stream_options is not None and self.stream_options.include_timing

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of the stream is to have the usage."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def num_drawn(self) -> int:
        """Sequences that are written to each prompt: n, or best_of where that is more."""
        return max(self.n, self.best_of or 0)

    @property
    def form(self) -> tuple[str, StructuredOutputs] | None:
        """The field that asks for a form of the answers, and the form; ApiError for what is none."""
        older = {name: getattr(self, name) for name in OLDER}
        return form_of(self.response_format, self.structured_outputs, older)

    def options(
        self, *, floor: int | None = None, timeout: float | None = None, adapter: str | None = None
    ) -> RequestOptions:
        """Returns how the request is served.

        floor: the least priority number, so the earliest turn, that its key allows; None for any.
        timeout: seconds. adapter: its name, where one is asked.
        """
        priority, salt = self.priority if floor is None else max(floor, self.priority), self.cache_salt or ""
        try:
            return RequestOptions(priority=priority, timeout=timeout, cache_salt=salt, adapter=adapter)
        except RequestError as error:
            raise named_error(error) from None

    def _params(self, config: ServeConfig, **own: Any) -> SamplingParams:
        """Returns the parameters, own ones among them; ApiError names the field that cannot be honoured."""
        self._check_limits(config)
        if self.truncate_prompt_tokens == 0:
            raise wrong("truncate_prompt_tokens", "truncate_prompt_tokens is 0; wanted 1 or more, or -1")
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "stream_options is given, but stream is not true; leave it out")
        if self.stream and self.num_drawn > self.n:
            raise wrong("best_of", f"best_of is {self.best_of}, above n {self.n}, and a stream cannot wait")
        if self.stream and self.prompt_logprobs is not None:
            raise wrong("prompt_logprobs", "prompt_logprobs is given with stream; wanted one of the two")
        given = {name: value for name in SAME if (value := getattr(self, name)) is not None}
        form = self.form
        try:
            return SamplingParams(**given, **own, structured_outputs=form and form[1])
        except RequestError as error:
            raise named_error(error) from None

    def _check_limits(self, config: ServeConfig) -> None:
        for name, most in (("n", config.max_sequences), ("best_of", config.max_sequences)):
            at_most(name, getattr(self, name), most)
        at_most("prompt_logprobs", self.prompt_logprobs, config.max_logprobs)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        held: tuple[tuple[str, Sized | None, int], ...] = (
            ("stop", stop, config.max_stop),
            ("stop_token_ids", self.stop_token_ids, config.max_stop),
            ("bad_words", self.bad_words, config.max_bad_words),
            ("logit_bias", self.logit_bias, config.max_logit_bias),
            ("allowed_token_ids", self.allowed_token_ids, config.max_allowed_token_ids),
        )
        for name, entries, most in held:
            if entries is not None and len(entries) > most:
                raise wrong(name, f"{name} holds {len(entries)} entries; wanted at most {most}")


def at_most(name: str, value: int | None, most: int) -> None:
    """Raises ApiError for a field above a limit of this server."""
    if value is not None and value > most:
        raise wrong(name, f"{name} is {shown(value)}; wanted at most {most}, this server's limit")


def check_num_sequences(request: GenerationRequest, num_prompts: int, config: ServeConfig) -> int:
    """Returns how many sequences a request asks for; ApiError for more than one request may."""
    num = num_prompts * request.num_drawn
    if num > config.max_sequences:
        name = "best_of" if request.num_drawn > request.n else "n"
        asked = f"{num_prompts} prompts with {name} {request.num_drawn} are {num} sequences"
        raise wrong(name, f"{asked}; wanted at most {config.max_sequences} in one request")
    return num


def unknown_model(name: str, names: Sequence[str], *, is_all: bool) -> ApiError:
    """Returns the 404 for a model that is not served; is_all: there are no adapters beside these names."""
    more = "" if is_all else ", or an adapter that /v1/models lists"
    message = f"the model {shown(name)} is not served here; wanted one of {', '.join(names)}{more}"
    return ApiError(status=404, message=message, param="model", code="model_not_found")


def named_error(error: RequestError, param: str | None = None) -> ApiError:
    """Returns the answer to an error of the library, naming the field that it speaks of, else `param`."""
    found = NAMED.match(str(error))
    return wrong(found["name"] if found else param, str(error))


def fitting(
    processor: "InputProcessor", prompt: str | Sequence[int], where: str, **options: Any
) -> tuple[int, ...]:
    """Returns a prompt as token ids that can be served; ApiError with `where` as its param for others."""
    try:
        return processor.prompt_ids(prompt, **options)
    except RequestError as error:
        raise placed(error, where) from None


def check_form(request: GenerationRequest, params: SamplingParams, processor: "InputProcessor") -> list[str]:
    """Returns what the form of the answers leaves out, in words, having compiled it in a thread's time.

    ApiError for what cannot be enforced.
    """
    form = request.form
    if form is None:
        return []
    try:
        return processor.warnings_of(params)
    except RequestError as error:
        named = named_error(error)
        raise placed(error, "ignore_eos" if named.param == "ignore_eos" else form[0]) from None


def check_prompt_logprobs(params: SamplingParams, num_prompt_tokens: int, config: ServeConfig) -> None:
    """Raises ApiError where log-probabilities of too many tokens of prompts are wanted in one request."""
    if params.prompt_logprobs is None:
        return
    num = num_prompt_tokens * (1 + params.prompt_logprobs)
    if num > config.max_prompt_logprobs:
        asked = f"{num_prompt_tokens} tokens of prompts with {params.prompt_logprobs} likeliest are {num}"
        most = f"wanted at most {config.max_prompt_logprobs} log-probabilities in one request"
        raise wrong("prompt_logprobs", f"{asked}; {most}")
