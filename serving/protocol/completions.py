"""Requests for completions, as OpenAI's clients, lm-eval and vLLM's write them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ...runtime.sampling_params import SamplingParams
from ..config import ServeConfig
from .decoding import Unserved, wrong
from .generation import GenerationRequest, NonNegative, at_most, fitting
from .unserved import COMPLETIONS

if TYPE_CHECKING:
    from ...runtime.engine.input_processor import InputProcessor


class CompletionRequest(GenerationRequest, kw_only=True, frozen=True):
    """A request for /v1/completions."""

    unserved: ClassVar[Mapping[str, Unserved]] = COMPLETIONS

    prompt: str | list[str | int | list[NonNegative]]
    max_tokens: NonNegative = 16
    """0 writes nothing: with echo and logprobs it tells how likely the prompt is."""
    max_completion_tokens: NonNegative | None = None
    """Goes before max_tokens where both are given, as in chats."""
    logprobs: NonNegative | None = None
    echo: bool = False
    """Whether the text begins with the prompt, and the log-probabilities with those of its tokens."""
    add_special_tokens: bool | None = None
    """Whether a text prompt gets the tokenizer's BOS and the like; otherwise unless it begins with it."""

    @property
    def max_output_tokens(self) -> int:
        """Tokens of an answer at most."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def writes_nothing(self) -> bool:
        """Whether no token of an answer is given back: one is sampled, as a step needs one, and dropped."""
        return self.max_output_tokens == 0

    def sampling_params(self, config: ServeConfig) -> SamplingParams:
        """Returns how the answers are sampled; with writes_nothing they have one token to be dropped."""
        at_most("logprobs", self.logprobs, config.max_logprobs)
        echoed = self.logprobs if self.echo else None
        wanted = [top for top in (self.prompt_logprobs, echoed) if top is not None]
        return self._params(
            config,
            max_tokens=max(1, self.max_output_tokens),
            logprobs=self.logprobs,
            prompt_logprobs=max(wanted, default=None),
        )

    def texts(self) -> list[str | list[int]]:
        """Returns the prompts, one or many, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = set(map(type, self.prompt))
        if kinds == {int}:
            return [list(self.prompt)]  # type: ignore[arg-type]
        if not kinds or len(kinds) > 1:
            got = "empty" if not kinds else "a list of different kinds"
            raise wrong("prompt", f"prompt is {got}; wanted a text, token ids, or a list of either")
        return list(self.prompt)  # type: ignore[arg-type]

    def prompts(self, processor: "InputProcessor", config: ServeConfig) -> list[tuple[int, ...]]:
        """Returns each prompt as token ids; long texts take a thread's time. ApiError names the prompt."""
        given = self.texts()
        if len(given) > config.max_prompts:
            raise wrong("prompt", f"prompt holds {len(given)} prompts; wanted at most {config.max_prompts}")
        many = len(given) > 1
        options: dict[str, Any] = {
            "add_special_tokens": self.add_special_tokens,
            "keep": self.truncate_prompt_tokens,
        }
        return [
            fitting(processor, each, f"prompt[{index}]" if many else "prompt", **options)
            for index, each in enumerate(given)
        ]
