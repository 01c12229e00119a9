"""Bodies of OpenAI's Responses API, as requests for chats."""

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ...common.errors import shown
from .chat import CalledFunction, ChatRequest, Message, Part, ToolCall, text_of
from .decoding import Body, Unserved, renamed_by, wrong
from .forms import JsonSchemaFormat, ResponseFormat
from .generation import NonNegative, Positive, StreamOptions
from .tool_fields import Function, NamedFunction, NamedTool, Tool
from .unserved import ACCEPTED, REASONING, RESPONSE_TEXT, RESPONSES

OWN_NAMES = {  # of chats' fields, the longer first
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_tokens": "max_output_tokens",
    "messages": "input",
}
OF_FUNCTION = re.compile(r"^(tools\[\d+\]|tool_choice)\.function(?=\.)")
IN_CHATS = re.compile(  # names of chats' fields in messages
    r"^messages\b|\b(max_tokens|reasoning_effort|response_format(\.json_schema)?)\b"
    r"|(tools\[\d+\]|tool_choice)\.function\.\w+"
)
SAME = (  # fields that chats have under the same name
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "chat_template_kwargs"),
    *("priority", "cache_salt", "stream", "stream_options", "parallel_tool_calls"),
)
OF_CHATS = Unserved(why="use /v1/chat/completions, which has it")
TAKEN = (*SAME, "tools", "tool_choice")
UNSERVED = {name: OF_CHATS for name in ChatRequest.__struct_fields__ if name not in TAKEN} | dict(RESPONSES)
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class FunctionTool(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A function that the model may call; other tools are not served."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def of_chats(self) -> Tool:
        """Returns the same as chats have it."""
        function = Function(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )
        return Tool(type="function", function=function)


class ChosenTool(msgspec.Struct, kw_only=True, frozen=True):
    """The tool that is to be called."""

    type: Literal["function"]
    name: str


ToolChoice = Literal["none", "auto", "required"] | ChosenTool


class InputPart(Part, kw_only=True, frozen=True):
    """A part of an item; those of text are served."""

    annotations: Any = None
    logprobs: Any = None


class InputItem(msgspec.Struct, kw_only=True, frozen=True):
    """A message, a call or its output, or reasoning; as an earlier response had it, too."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: Any = None
    encrypted_content: Any = None


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
    accepted: ClassVar[frozenset[str]] = (ACCEPTED - {"metadata", "store"}) | {"prompt_cache_retention"}
    large: ClassVar[frozenset[str]] = frozenset({"input", "instructions", "text", "tools"})

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
    tools: list[FunctionTool] | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """auto where there are tools: the model decides; required: it calls one or more; or the one to call."""
    parallel_tool_calls: bool = True
    """Whether a call that is required may be several."""
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
        return turns_of(self.input)

    def chat(self, turns: Sequence[Message]) -> ChatRequest:
        """Returns the same as a request for a chat of these turns; its errors are to be renamed()."""
        first = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        return ChatRequest(
            messages=[*first, *turns],
            max_tokens=self.max_output_tokens,
            response_format=_chat_format(self.format),
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            tools=[tool.of_chats() for tool in self.tools or []] or None,
            tool_choice=self._chat_choice,
            **{name: getattr(self, name) for name in SAME},
        )

    @property
    def _chat_choice(self) -> Literal["none", "auto", "required"] | NamedTool | None:
        choice = self.tool_choice
        if isinstance(choice, ChosenTool):
            return NamedTool(type="function", function=NamedFunction(name=choice.name))
        return None if choice == "auto" and not self.tools else choice


def turns_of(items: Sequence[InputItem]) -> list[Message]:
    """Returns items as messages of a chat, what one answer held as one; ApiError 400 for what is no text."""
    answers: list[list[Message]] = []
    for index, item in enumerate(items):
        turn = _turn(f"input[{index}]", item)
        if answers and _goes_on(answers[-1][-1], turn):
            answers[-1].append(turn)
        else:
            answers.append([turn])
    return list(map(_joined, answers))


def renamed() -> AbstractContextManager[None]:
    """Has errors of the chat that a response is made of name the fields of the response."""
    return renamed_by(_renamed, lambda message: IN_CHATS.sub(lambda found: _renamed(found[0]), message))


def _renamed(path: str) -> str:
    for chats, own in OWN_NAMES.items():
        if path.startswith(chats):
            return own + path.removeprefix(chats)
    return OF_FUNCTION.sub(r"\1", path)


def _chat_format(given: TextFormat) -> ResponseFormat:
    if given.type != "json_schema":
        return ResponseFormat(type=given.type)
    return ResponseFormat(type=given.type, json_schema=JsonSchemaFormat(schema=given.schema))


def _turn(where: str, item: InputItem) -> Message:
    if item.type == "function_call":
        called = CalledFunction(name=_given(where, item, "name"), arguments=_given(where, item, "arguments"))
        return Message(
            role="assistant", tool_calls=[ToolCall(id=item.call_id, type="function", function=called)]
        )
    if item.type == "function_call_output":
        output = _texts(f"{where}.output", _given(where, item, "output"))
        return Message(role="tool", tool_call_id=_given(where, item, "call_id"), content=output)
    if item.type == "reasoning":
        return Message(role="assistant", reasoning_content=_texts(f"{where}.content", item.content or ""))
    if item.type != "message":
        wanted = "wanted message, function_call, function_call_output or reasoning"
        what = f"{where} is of type {shown(item.type)}, and is not served; {wanted}"
        raise wrong(f"{where}.type", what, code="unsupported_field")
    content = _texts(f"{where}.content", _given(where, item, "content"))
    return Message(role=_given(where, item, "role"), content=content)


def _given(where: str, item: InputItem, name: str) -> Any:
    value = getattr(item, name)
    if value is None:
        raise wrong(f"{where}.{name}", f"{where}.{name} is missing; it is required")
    return value


def _goes_on(last: Message, turn: Message) -> bool:
    """Whether an item belongs to the answer of which the one before it is a part."""
    if last.role != "assistant" or turn.role != "assistant":
        return False
    return bool(turn.tool_calls) or (last.content is None and not last.tool_calls)


def _joined(parts: Sequence[Message]) -> Message:
    """Returns the items of one answer as its message."""
    if len(parts) == 1:
        return parts[0]
    return Message(
        role="assistant",
        content=next((part.content for part in parts if part.content is not None), None),
        tool_calls=[call for part in parts for call in part.tool_calls or ()] or None,
        reasoning_content="".join(part.reasoning_content or "" for part in parts) or None,
    )


def _texts(where: str, content: str | list[InputPart]) -> str:
    if isinstance(content, str):
        return content
    types = "input_text", "output_text", "reasoning_text"
    return "".join(text_of(f"{where}[{index}]", part, *types) for index, part in enumerate(content))
