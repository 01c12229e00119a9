"""Requests of /tokenize and /detokenize."""

from typing import TYPE_CHECKING, Any, ClassVar

from ...common.errors import RequestError
from ..config import ServeConfig
from .chat import ChatRequest, Message
from .decoding import Body, wrong
from .generation import NonNegative, placed

if TYPE_CHECKING:
    from ...runtime.engine.input_processor import InputProcessor


class TokenizeRequest(Body, kw_only=True, frozen=True):
    """A text, or a conversation, to be made token ids."""

    large: ClassVar[frozenset[str]] = frozenset(("prompt", "messages"))

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    """Of a text: whether it gets the tokenizer's BOS and the like; otherwise unless it begins with it."""
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def token_ids(self, processor: "InputProcessor", config: ServeConfig) -> list[int]:
        """Returns the token ids, of whatever number; a long text takes a thread's time."""
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "prompt and messages are both given or both missing; wanted one of the two")
        if self.messages is not None:
            return list(self._chat(self.messages).prompt(processor, config))
        if processor.tokenizer is None:
            raise wrong("prompt", "the model has no tokenizer, so that no text can be read")
        try:
            return processor.tokenizer.encode(self.prompt or "", self.add_special_tokens)
        except RequestError as error:
            raise placed(error, "prompt") from None

    def _chat(self, messages: list[Message]) -> ChatRequest:
        return ChatRequest(
            messages=messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class DetokenizeRequest(Body, kw_only=True, frozen=True):
    """Token ids to be made text."""

    large: ClassVar[frozenset[str]] = frozenset(("tokens",))

    model: str | None = None
    tokens: list[NonNegative]
    skip_special_tokens: bool = False
