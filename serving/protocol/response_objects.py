"""What the Responses API answers, field by field, as openapi.json promises it."""

from typing import Any, Literal

import msgspec

from .response_models import ResponseModel
from .responses import FunctionTool, TextFormat, ToolChoice
from .usage import Usage

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
EventType = Literal[
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
    "response.incomplete",
    "response.failed",
]


class OutputText(ResponseModel, kw_only=True):
    """What the model wrote."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[Any] = msgspec.field(default_factory=list)


class OutputMessage(ResponseModel, kw_only=True, tag_field="type", tag="message"):
    """A message of the assistant."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class ReasoningText(ResponseModel, kw_only=True):
    """What the model wrote before its answer."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ReasoningItem(ResponseModel, kw_only=True, tag_field="type", tag="reasoning"):
    """The reasoning before an answer."""

    id: str
    summary: list[Any] = msgspec.field(default_factory=list)
    status: ItemStatus
    content: list[ReasoningText]


class FunctionCall(ResponseModel, kw_only=True, tag_field="type", tag="function_call"):
    """A call of one of the tools."""

    id: str
    call_id: str
    name: str
    arguments: str
    """JSON."""
    status: ItemStatus


OutputItem = OutputMessage | ReasoningItem | FunctionCall


class InputTokensDetails(ResponseModel, kw_only=True):
    """Of which kinds the tokens of the prompt were."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(ResponseModel, kw_only=True):
    """Of which kinds the tokens of the answer were; reasoning is not counted apart."""

    reasoning_tokens: int = 0


class ResponseUsage(ResponseModel, kw_only=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> "ResponseUsage":
        """Returns the usage of a chat in the names of responses."""
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(),
            total_tokens=usage.total_tokens,
        )


class FailedBy(ResponseModel, kw_only=True):
    """What ended a response before its time."""

    code: str
    message: str


class IncompleteDetails(ResponseModel, kw_only=True):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseReasoning(ResponseModel, kw_only=True):
    """How much the model was to reason."""

    effort: str | None
    summary: None = None


class ResponseText(ResponseModel, kw_only=True):
    """How the text was to be."""

    format: TextFormat


class ResponseObject(ResponseModel, kw_only=True):
    """A response, written or being written."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    error: FailedBy | None = None
    incomplete_details: IncompleteDetails | None = None
    background: Literal[False] = False
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = msgspec.field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ResponseReasoning
    store: bool
    temperature: float | None
    text: ResponseText
    tool_choice: ToolChoice
    tools: list[FunctionTool]
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    """null until it is written."""


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event of a response that is being written; docs/serving.md has their order."""

    type: EventType
    sequence_number: int


class DeletedResponse(ResponseModel, kw_only=True):
    """A response that is kept no longer."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
