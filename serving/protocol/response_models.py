"""What routes answer, field by field: the shapes that openapi.json promises and tests hold answers to."""

from typing import Any, Literal

import msgspec

from .logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprob
from .usage import Usage

FinishReason = Literal["stop", "length", "abort"]
ChatFinishReason = Literal["stop", "length", "abort", "tool_calls"]


class ResponseModel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An answer, or a part of one, that has these fields and no others."""


class ErrorInfo(ResponseModel, kw_only=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field of the body that is at fault, as messages[0].content."""
    code: str | None


class ErrorResponse(ResponseModel, kw_only=True):
    """Every answer that is no success."""

    error: ErrorInfo


class CalledFunction(ResponseModel, kw_only=True):
    """A function that the model calls."""

    name: str
    arguments: str
    """JSON, as far as the model wrote any."""


class ToolCall(ResponseModel, kw_only=True):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Choice(ResponseModel, kw_only=True):
    """What is said of one answer, or of a piece of it, in whatever shape it has."""

    index: int
    stop_reason: int | str | None = None
    """The token id or text of the request that ended it."""
    token_ids: list[int] | None = None


class Generated(ResponseModel, kw_only=True):
    """What is said beside the answers that a model wrote."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    system_fingerprint: str | None = None


class AssistantMessage(ResponseModel, kw_only=True):
    """What the model wrote."""

    role: Literal["assistant"]
    content: str | None
    """null where there is nothing but calls or reasoning."""
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(Choice, kw_only=True):
    """One answer to a conversation."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    token_ids: list[int] | None = None


class ChatCompletion(Generated, kw_only=True):
    """The answers to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class FunctionDelta(ResponseModel, kw_only=True):
    """What a chunk adds to a call: at first its name, then pieces of the arguments."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str


class ToolCallDelta(ResponseModel, kw_only=True):
    """What a chunk adds to the call of that index; the first has an id and a name."""

    index: int
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET
    function: FunctionDelta


class ChatDelta(ResponseModel, kw_only=True):
    """What a chunk adds to an answer."""

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(Choice, kw_only=True):
    """What a chunk tells of one answer to a conversation."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    token_ids: list[int] | None = None


class ChatChunk(Generated, kw_only=True):
    """An event of a streamed chat; the last of a stream is the text [DONE]."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChoice(Choice, kw_only=True):
    """One continuation of a prompt, or what a chunk adds to it."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class Completion(Generated, kw_only=True):
    """The continuations of all prompts, or an event of a stream of them."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelEntry(ResponseModel, kw_only=True):
    """A name of the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int
    tasks: list[str]
    """What may be asked of it: generate, embed, classify, score."""


class ModelList(ResponseModel, kw_only=True):
    """All names of the model."""

    object: Literal["list"]
    data: list[ModelEntry]


class Version(ResponseModel, kw_only=True):
    """Which Lamina this is."""

    version: str


class Live(ResponseModel, kw_only=True):
    """The process lives."""

    status: Literal["live"]


Anything = dict[str, Any]


class Ready(ResponseModel, kw_only=True):
    """Whether a step can run; with 503, an error stands beside these."""

    status: Literal["starting", "ready", "draining", "failed", "stalled", "asleep"]
    reason: str | None
    num_steps: int = 0
    step_seconds: float | None = None
    building: str | None = None
    engines: list[Anything] = []  # of several engines each: its number, state, reason and requests
    models: dict[str, Anything] = {}  # of several models: the same of each, by its first name
