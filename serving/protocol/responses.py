"""Bodies of OpenAI's Responses API, as requests for chats."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ...common.errors import shown
from ..errors import ApiError
from .chat import ChatRequest, Message, Part, text_of
from .decoding import Body, Unserved, wrong
from .forms import JsonSchemaFormat, ResponseFormat
from .generation import NonNegative, Positive, StreamOptions
from .unserved import ACCEPTED, REASONING, RESPONSE_TEXT, RESPONSES

OWN_NAMES = {  # of chats' fields, the longer first
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_tokens": "max_output_tokens",
    "messages": "input",
}
SAME = (  # fields that chats have under the same name
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "chat_template_kwargs"),
    *("priority", "cache_salt", "stream", "stream_options"),
)
OF_CHATS = Unserved(why="use /v1/chat/completions, which has it")
TAKEN = (*SAME, "parallel_tool_calls")  # without tools it changes nothing
UNSERVED = {name: OF_CHATS for name in ChatRequest.__struct_fields__ if name not in TAKEN} | dict(RESPONSES)
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class InputPart(Part, kw_only=True, frozen=True):
    """A part of an item; those of type input_text and output_text are served."""

    annotations: Any = None
    logprobs: Any = None


class InputItem(msgspec.Struct, kw_only=True, frozen=True):
    """A message of the conversation; as an earlier response had it, too."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class TextFormat(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Any text, any JSON object, or JSON that a schema accepts; it is enforced whether strict or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, frozen=True):
    """How the text is to be."""

    unserved: ClassVar[Mapping[str, Unserved]] = RESPONSE_TEXT

    format: TextFormat | None = None


class Reasoning(msgspec.Struct, kw_only=True, frozen=True):
    """How much the model is to reason; handed to the chat template, and refused where that reads none."""

    unserved: ClassVar[Mapping[str, Unserved]] = REASONING

    effort: str | None = None


class ResponsesRequest(Body, kw_only=True, frozen=True):
    """A request for /v1/responses."""

    unserved: ClassVar[Mapping[str, Unserved]] = UNSERVED
    accepted: ClassVar[frozenset[str]] = (ACCEPTED - {"metadata", "store"}) | {
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
    large: ClassVar[frozenset[str]] = frozenset({"input", "instructions", "text"})

    input: str | list[InputItem]
    """What the user says, or messages."""
    instructions: str | None = None
    """What the model is to be told before all messages; not carried over to a next response."""
    previous_response_id: str | None = None
    """A stored response whose conversation goes on."""
    store: bool = False
    """Whether the response is kept for a while, to be asked for, and to be gone on from."""
    metadata: Metadata | None = None
    """Given back with the response."""
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Positive | None = None
    """Tokens of the answer at most; otherwise the rest of the context is free."""
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    min_tokens: NonNegative = 0
    ignore_eos: bool = False
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int = 0
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def format(self) -> TextFormat:
        """The form of the text."""
        given = None if self.text is None else self.text.format
        return TextFormat(type="text") if given is None else given

    def turns(self) -> list[Message]:
        """Returns the input as messages of a chat; ApiError 400 names what is no text."""
        if isinstance(self.input, str):
            return [Message(role="user", content=self.input)]
        if not self.input:
            raise wrong("input", "input is empty; wanted a text, or at least one message")
        return [_message(f"input[{index}]", item) for index, item in enumerate(self.input)]

    def chat(self, turns: Sequence[Message]) -> ChatRequest:
        """Returns the same as a request for a chat of these turns; its errors are to be renamed()."""
        first = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        return ChatRequest(
            messages=[*first, *turns],
            max_tokens=self.max_output_tokens,
            response_format=_chat_format(self.format),
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            **{name: getattr(self, name) for name in SAME},
        )


@contextmanager
def renamed() -> Iterator[None]:
    """Has errors of the chat that a response is made of name the fields of the response."""
    try:
        yield
    except ApiError as error:
        param = error.param or ""
        for chats, own in OWN_NAMES.items():
            if param.startswith(chats):
                error.param = own + param.removeprefix(chats)
                error.message = error.message.replace(param, error.param, 1)
                break
        raise


def _chat_format(given: TextFormat) -> ResponseFormat:
    if given.type != "json_schema":
        return ResponseFormat(type=given.type)
    return ResponseFormat(type=given.type, json_schema=JsonSchemaFormat(schema=given.schema))


def _message(where: str, item: InputItem) -> Message:
    if item.type != "message":
        what = f"{where} is of type {shown(item.type)}, and is not served; wanted message"
        raise wrong(f"{where}.type", what, code="unsupported_field")
    if item.role is None:
        raise wrong(f"{where}.role", f"{where}.role is missing; it is required")
    if item.content is None:
        raise wrong(f"{where}.content", f"{where}.content is missing; it is required")
    if isinstance(item.content, str):
        return Message(role=item.role, content=item.content)
    types = "input_text", "output_text"
    parts = [text_of(f"{where}.content[{at}]", part, *types) for at, part in enumerate(item.content)]
    return Message(role=item.role, content="".join(parts))
