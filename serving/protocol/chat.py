"""Requests for chat completions, as OpenAI's clients and vLLM's write them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ...common.errors import RequestError, shown
from ...runtime.sampling_params import SamplingParams
from ..config import ServeConfig
from .decoding import Unserved, placed, wrong
from .generation import GenerationRequest, NonNegative, Positive, at_most, fitting
from .tool_fields import NamedTool, Tool, ToolChoice, check_tools
from .unserved import CHAT, CHAT_ACCEPTED, MESSAGE

if TYPE_CHECKING:
    from ...runtime.engine.input_processor import InputProcessor


class Part(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """A part of a message; text_of() refuses those that are no text."""

    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The function that the model called, and with what: JSON as text, or an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A call that the model made in an earlier answer."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None


class Message(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, gc=False):
    """One message of a conversation."""

    unserved: ClassVar[Mapping[str, Unserved]] = MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class ChatRequest(GenerationRequest, kw_only=True, frozen=True):
    """A request for /v1/chat/completions."""

    unserved: ClassVar[Mapping[str, Unserved]] = CHAT
    accepted: ClassVar[frozenset[str]] = CHAT_ACCEPTED
    large: ClassVar[frozenset[str]] = GenerationRequest.large | {"tools"}

    messages: list[Message]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    """Goes before max_tokens where both are given; without either the rest of the context is free."""
    logprobs: bool = False
    top_logprobs: NonNegative | None = None
    tools: list[Tool] | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """auto where there are tools: the model decides; required: it calls one or more; or the one to call."""
    parallel_tool_calls: bool = True
    """Whether a call that is required may be several."""
    include_reasoning: bool = True
    """Whether reasoning is told, in reasoning_content beside the content."""
    reasoning_effort: str | None = None
    """Handed to the chat template, and refused where that does not read it."""
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    """True unless the final message is continued."""
    continue_final_message: bool = False
    chat_template: Annotated[str, Meta(min_length=1)] | None = None

    @property
    def max_output_tokens(self) -> int | None:
        """Tokens of an answer at most; None for the rest of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model hears of; none where it is to call none."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def required_tools(self) -> list[Tool] | None:
        """The tools of which one is to be called; None where the model decides."""
        if isinstance(self.tool_choice, NamedTool):
            return [
                tool for tool in self.offered_tools if tool.function.name == self.tool_choice.function.name
            ]
        return self.offered_tools if self.tool_choice == "required" else None

    def sampling_params(self, config: ServeConfig) -> SamplingParams:
        """Returns how the answers are sampled; InputProcessor.chat_params fills what is left open."""
        check_tools(self.tools, self.tool_choice)
        if self.top_logprobs and not self.logprobs:
            got = f"top_logprobs is {self.top_logprobs}, but logprobs is not true"
            raise wrong("top_logprobs", f"{got}; set logprobs to true, or leave it out")
        at_most("top_logprobs", self.top_logprobs, config.max_logprobs)
        return self._params(
            config,
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )

    def conversation(self, config: ServeConfig) -> list[dict[str, Any]]:
        """Returns the messages as chat templates read them; ApiError names what is no text."""
        if not 0 < len(self.messages) <= config.max_messages:
            got = f"messages holds {len(self.messages)} messages"
            raise wrong("messages", f"{got}; wanted at least one, at most {config.max_messages}")
        for index, message in enumerate(self.messages):
            _check_content(f"messages[{index}].content", message)
        found: list[dict[str, Any]] = msgspec.to_builtins(self.messages)
        return found

    def prompt(self, processor: "InputProcessor", config: ServeConfig) -> tuple[int, ...]:
        """Returns the conversation as token ids, by the chat template; a long one takes a thread's time.

        ApiError names the field that the template, or the server, does not take.
        """
        if self.continue_final_message and self.add_generation_prompt:
            wanted = "continue_final_message and add_generation_prompt are both true; wanted one of them"
            raise wrong("continue_final_message", wanted)
        if self.chat_template is not None and not config.trust_request_chat_template:
            raise wrong("chat_template", "chat_template is given; this server uses the model's own alone")
        adds = self.add_generation_prompt
        adds = not self.continue_final_message if adds is None else adds
        messages, variables = self.conversation(config), self._template_kwargs(processor)
        tools = msgspec.to_builtins(self.offered_tools) or None
        try:
            token_ids = processor.chat_prompt(
                messages, tools, variables, self.continue_final_message, self.chat_template, adds
            )
        except RequestError as error:
            found = placed(error, _field_of(str(error)))
            found.code = "unsupported_field" if found.param == "tools" else found.code
            raise found from None
        return fitting(processor, token_ids, "messages", keep=self.truncate_prompt_tokens)

    def _template_kwargs(self, processor: "InputProcessor") -> dict[str, Any]:
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            if not processor.template_reads("reasoning_effort", self.chat_template):
                got = f"reasoning_effort is {shown(self.reasoning_effort)}"
                raise wrong("reasoning_effort", f"{got}, which this model's chat template does not read")
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        return variables


def _field_of(message: str) -> str:
    """Returns the field that an error of a chat template speaks of."""
    if message.startswith("template_kwargs"):
        return "chat_template_kwargs"
    return "tools" if "does not read tools" in message else "messages"


def text_of(where: str, part: Part, *types: str) -> str:
    """Returns the text of a part of a message; ApiError for one of another type, or without text."""
    if part.type not in types:
        what = f"{where} is of type {shown(part.type)}, and is not served; wanted {' or '.join(types)}"
        raise wrong(f"{where}.type", what, code="unsupported_field")
    if part.text is None:
        raise wrong(f"{where}.text", f"{where}.text is missing; it is required")
    return part.text


def _check_content(where: str, message: Message) -> None:
    if isinstance(message.content, list):
        for place, part in enumerate(message.content):
            text_of(f"{where}[{place}]", part, "text")
    elif message.content is None and not (message.tool_calls or message.reasoning_content):
        raise wrong(where, f"{where} is missing; wanted a text, or parts of type text")
