"""Bodies of Anthropic's Messages API, as requests for chats."""

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

import msgspec

from .chat import ChatRequest, Message
from .decoding import Body, Unserved, renamed_by, wrong
from .forms import JsonSchemaFormat, ResponseFormat
from .generation import NonNegative, Positive
from .message_turns import ContentBlock, Turn, chat_messages
from .response_models import ResponseModel
from .tool_fields import Function, NamedFunction, NamedTool, Tool
from .tool_fields import ToolChoice as ChatChoice

RENAMED = Unserved(why="name it output_config.format")
NO_EFFORT = Unserved(why="the model takes no effort; leave it out")
NO_EXAMPLES = Unserved(why="show calls in messages", neutral=([],))
NO_SEARCH = Unserved(why="the model hears of every tool", neutral=(False,))
NO_PROGRAMS = Unserved(why="the model's text calls tools, and nothing else does", neutral=(["direct"],))
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
EventType = Literal[
    "message_start",
    "content_block_start",
    "ping",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
    "error",
]
TEXT_ALONE = Unserved(why="this server reads and writes text alone; leave it out", neutral=([], {}))
OWN_NAMES = (  # of chats' fields, wherever they stand
    (re.compile(r"\btools\[(\d+)\]\.function\.parameters\b"), r"tools[\1].input_schema"),
    (re.compile(r"\btools\[(\d+)\]\.function\."), r"tools[\1]."),
    (re.compile(r"\btool_choice\.function\."), "tool_choice."),
    (re.compile(r"\bresponse_format(?:\.json_schema(?:\.schema)?)?\b"), "output_config.format.schema"),
    (re.compile(r"\btool_choice is required\b"), "tool_choice is any"),
    (re.compile(r"^stop(?=$|\[| is | holds )|\bstop(?==None\b)"), "stop_sequences"),
)


class CustomTool(msgspec.Struct, kw_only=True, frozen=True):
    """A function that the model may call; other tools are not served."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        "input_examples": NO_EXAMPLES,
        "defer_loading": NO_SEARCH,
        "allowed_callers": NO_PROGRAMS,
    }

    name: str
    input_schema: dict[str, Any]
    """A JSON schema of an object, the input."""
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None
    """Taken: input is always sent as it is written."""

    def of_chats(self) -> Tool:
        """Returns the same as chats have it."""
        function = Function(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool(type="function", function=function)


class ToolChoice(msgspec.Struct, kw_only=True, frozen=True):
    """auto: the model decides; any: it calls one or more; tool: the one to call; none: there are none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False
    """Whether a call that is required is one alone."""


class Thinking(msgspec.Struct, kw_only=True, frozen=True):
    """Whether the model is to reason before it answers, as far as its chat template asks."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: NonNegative | None = None
    """Taken and not enforced, as a header says: max_tokens bounds both."""
    display: Literal["summarized", "omitted"] | None = None
    """omitted leaves it out of the answer; otherwise it is told as it is written."""


class OutputFormat(msgspec.Struct, kw_only=True, frozen=True):
    """The schema that the answer's JSON keeps to."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, frozen=True):
    """How the answer is to be."""

    unserved: ClassVar[Mapping[str, Unserved]] = {"effort": NO_EFFORT}

    format: OutputFormat | None = None


class Conversation(Body, kw_only=True, frozen=True):
    """What a message answers, and what /v1/messages/count_tokens counts."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        "output_format": RENAMED,
        "mcp_servers": TEXT_ALONE,
        "container": TEXT_ALONE,
        "context_management": TEXT_ALONE,
    }
    accepted: ClassVar[frozenset[str]] = frozenset(
        ("metadata", "service_tier", "cache_control", "inference_geo", "diagnostics", "speed")
    ) | {"user_profile_id", "workspace_id"}
    large: ClassVar[frozenset[str]] = frozenset({"messages", "system", "tools"})

    messages: list[Turn]
    """Turns of user and assistant; where the last is the assistant's, the answer goes on from it."""
    system: str | list[ContentBlock] | None = None
    """What the model is to be told before all turns."""
    tools: list[CustomTool] | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """Whether it has to call one; without it the model decides."""
    thinking: Thinking | None = None
    """Whether it reasons first; without it as its chat template has it."""
    output_config: OutputConfig | None = None
    """The form of the answer, which no token of a prompt tells of."""

    @property
    def continues(self) -> bool:
        """Whether the answer goes on from a turn that the assistant has begun."""
        return bool(self.messages) and self.messages[-1].role == "assistant"

    def chat_messages(self) -> list[Message]:
        """Returns the system prompt and the turns as messages of a chat; ApiError 400 for what is none."""
        found = chat_messages(self.messages, self.system)
        if self.continues and found[-1].tool_calls:
            where = f"messages[{len(self.messages) - 1}]"
            raise wrong(
                where, f"{where} ends with a tool_use; wanted a turn of the user with its tool_result"
            )
        return found

    def chat(self, **own: Any) -> ChatRequest:
        """Returns the same as a request for a chat; its errors are to be renamed(). own: further fields."""
        return ChatRequest(
            model=self.model,
            messages=self.chat_messages(),
            continue_final_message=self.continues,
            tools=[tool.of_chats() for tool in self.tools or ()] or None,
            tool_choice=self._chat_choice,
            parallel_tool_calls=not (self.tool_choice and self.tool_choice.disable_parallel_tool_use),
            include_reasoning=self.thinking is None or self.thinking.display != "omitted",
            **own,
        )

    @property
    def reasons(self) -> bool | None:
        """Whether the model is asked to reason, or not to; None where neither."""
        if self.thinking is None or self.thinking.type == "adaptive":
            return None
        return self.thinking.type == "enabled"

    @property
    def _chat_choice(self) -> ChatChoice | None:
        choice = self.tool_choice
        if choice is None or (choice.type == "auto" and not self.tools):
            return None
        if choice.type == "tool":
            if choice.name is None:
                raise wrong(
                    "tool_choice.name", "tool_choice.name is missing; it is required by the type tool"
                )
            return NamedTool(type="function", function=NamedFunction(name=choice.name))
        return "required" if choice.type == "any" else choice.type


class MessagesRequest(Conversation, kw_only=True, frozen=True):
    """A message that is to be written."""

    max_tokens: Positive
    """Tokens of the answer at most."""
    stop_sequences: list[str] | None = None
    """Texts that end the answer."""
    temperature: float | None = None
    """0 always takes the likeliest token; 1 draws as the model says."""
    top_k: int | None = None
    """Draw among the k likeliest tokens."""
    top_p: float | None = None
    """Draw among the likeliest tokens that together reach this probability."""
    stream: bool = False
    """Whether the answer comes piece by piece, as server-sent events."""

    def chat(self, **own: Any) -> ChatRequest:
        """Returns the same as a request for a chat; its errors are to be renamed(). own: further fields."""
        return super().chat(
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            stream=self.stream,
            response_format=self._response_format,
            **own,
        )

    @property
    def _response_format(self) -> ResponseFormat | None:
        if self.output_config is None or self.output_config.format is None:
            return None
        json_schema = JsonSchemaFormat(schema=self.output_config.format.schema)
        return ResponseFormat(type="json_schema", json_schema=json_schema)


class TextBlock(ResponseModel, kw_only=True, tag_field="type", tag="text"):
    """What the model wrote."""

    text: str


class ThinkingBlock(ResponseModel, kw_only=True, tag_field="type", tag="thinking"):
    """The reasoning before an answer."""

    thinking: str
    signature: str
    """Empty: nothing is signed."""


class ToolUseBlock(ResponseModel, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of one of the tools."""

    id: str
    name: str
    input: dict[str, Any]
    """As far as the model wrote it, where max_tokens cut it."""


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(ResponseModel, kw_only=True):
    """Tokens of a message; those of the prompt that were in the prefix cache are counted apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageResponse(ResponseModel, kw_only=True):
    """A message of the assistant."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    """null while the message is written."""
    stop_sequence: str | None
    """The stop sequence that ended it."""
    usage: MessageUsage


class MessageEvent(msgspec.Struct, kw_only=True):
    """An event of a message that is being written; docs/serving.md has the fields of each type."""

    type: EventType


class TokenCount(ResponseModel, kw_only=True):
    """Tokens of a prompt."""

    input_tokens: int


class MessageErrorInfo(ResponseModel, kw_only=True):
    """What went wrong."""

    type: str
    message: str


class MessageErrorResponse(ResponseModel, kw_only=True):
    """Every answer of these routes that is no success."""

    type: Literal["error"]
    error: MessageErrorInfo


def renamed() -> AbstractContextManager[None]:
    """Has errors of the chat that a message is made of name the fields of the message."""
    return renamed_by(_renamed, _renamed)


def _renamed(text: str) -> str:
    for found, own in OWN_NAMES:
        text = found.sub(own, text)
    return text
