"""Bodies of Anthropic's Messages API, as requests for chats."""

from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar, Literal

import msgspec

from .answers import Answer
from .chat import ChatRequest, Message, Part, text_of
from .decoding import Body, Unserved, wrong
from .forms import JsonSchemaFormat, ResponseFormat
from .generation import Positive

NO_TOOLS = Unserved(why="tools are not offered to the model yet; leave it out", neutral=([],))
NO_CHOICE = Unserved(why=NO_TOOLS.why, neutral=({"type": "none"},))
NO_THINKING = Unserved(
    why="thinking is not told apart from text; leave it out", neutral=({"type": "disabled"},)
)
RENAMED = Unserved(why="name it output_config.format")
NO_EFFORT = Unserved(why="the model takes no effort; leave it out")
Role = Literal["system", "user", "assistant"]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "model_context_window_exceeded"]
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


class ContentBlock(Part, kw_only=True, frozen=True):
    """A part of a turn; those of type text are served."""

    cache_control: Any = None  # prefixes are cached without being asked
    citations: Any = None


class Turn(msgspec.Struct, kw_only=True, frozen=True):
    """What one side says."""

    role: Literal["user", "assistant"]
    content: str | list[ContentBlock]


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
        "tools": NO_TOOLS,
        "tool_choice": NO_CHOICE,
        "thinking": NO_THINKING,
        "output_format": RENAMED,
        "mcp_servers": TEXT_ALONE,
        "container": TEXT_ALONE,
        "context_management": TEXT_ALONE,
    }
    accepted: ClassVar[frozenset[str]] = frozenset(
        ("metadata", "service_tier", "cache_control", "inference_geo", "diagnostics", "speed")
    ) | {"user_profile_id", "workspace_id"}
    large: ClassVar[frozenset[str]] = frozenset({"messages", "system"})

    messages: list[Turn]
    """Turns of user and assistant; where the last is the assistant's, the answer goes on from it."""
    system: str | list[ContentBlock] | None = None
    """What the model is to be told before all turns."""
    output_config: OutputConfig | None = None
    """The form of the answer, which no token of a prompt tells of."""

    @property
    def continues(self) -> bool:
        """Whether the answer goes on from a turn that the assistant has begun."""
        return bool(self.messages) and self.messages[-1].role == "assistant"

    def chat_messages(self) -> list[Message]:
        """Returns the system prompt and the turns as messages of a chat, neighbours of one role as one.

        Raises ApiError 400 where there is no turn, and for what is no text.
        """
        if not self.messages:
            raise wrong("messages", "messages is empty; wanted at least one turn")
        texts: list[tuple[Role, str]] = [
            (turn.role, _text(f"messages[{index}].content", turn.content))
            for index, turn in enumerate(self.messages)
        ]
        if self.system is not None:
            texts.insert(0, ("system", _text("system", self.system)))
        return [
            Message(role=role, content="\n\n".join(text for _, text in group))
            for role, group in groupby(texts, itemgetter(0))
        ]


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

    def chat(self) -> ChatRequest:
        """Returns the same as a request for a chat; ApiError 400 as chat_messages() has it."""
        return ChatRequest(
            model=self.model,
            messages=self.chat_messages(),
            continue_final_message=self.continues,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            stream=self.stream,
            response_format=self._response_format,
        )

    @property
    def _response_format(self) -> ResponseFormat | None:
        if self.output_config is None or self.output_config.format is None:
            return None
        json_schema = JsonSchemaFormat(schema=self.output_config.format.schema)
        return ResponseFormat(type="json_schema", json_schema=json_schema)


class TextBlock(Answer, kw_only=True):
    """What the model wrote."""

    type: Literal["text"]
    text: str


class MessageUsage(Answer, kw_only=True):
    """Tokens of a message; those of the prompt that were in the prefix cache are counted apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(Answer, kw_only=True):
    """A message of the assistant."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock]
    stop_reason: StopReason | None
    """null while the message is written."""
    stop_sequence: str | None
    """The stop sequence that ended it."""
    usage: MessageUsage


class MessageEvent(msgspec.Struct, kw_only=True):
    """An event of a message that is being written; docs/serving.md has the fields of each type."""

    type: EventType


class TokenCount(Answer, kw_only=True):
    """Tokens of a prompt."""

    input_tokens: int


class MessageErrorFields(Answer, kw_only=True):
    """What went wrong."""

    type: str
    message: str


class MessageErrorAnswer(Answer, kw_only=True):
    """Every answer of these routes that is no success."""

    type: Literal["error"]
    error: MessageErrorFields


def _text(where: str, content: str | list[ContentBlock]) -> str:
    """Returns the text of all blocks; ApiError names the first that is none."""
    if isinstance(content, str):
        return content
    return "".join(text_of(f"{where}[{index}]", block, "text") for index, block in enumerate(content))
