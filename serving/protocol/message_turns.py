"""Turns of Anthropic's Messages API, block by block, as messages of a chat."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal

import msgspec

from .chat import CalledFunction, Message, Part, ToolCall, text_of
from .decoding import wrong


class ContentBlock(Part, kw_only=True, frozen=True):
    """A part of a turn: text, a call or its result, or what was thought."""

    cache_control: Any = None  # prefixes are cached without being asked
    citations: Any = None
    id: str | None = None
    """Of a tool_use."""
    name: str | None = None
    input: dict[str, Any] | None = None
    caller: Any = None
    tool_use_id: str | None = None
    """Of a tool_result: the call that it answers."""
    content: "str | list[ContentBlock] | None" = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: Any = None
    data: Any = None
    """Of redacted_thinking, which nobody can read."""


class Turn(msgspec.Struct, kw_only=True, frozen=True):
    """What one side says."""

    role: Literal["user", "assistant"]
    content: str | list[ContentBlock]


def chat_messages(turns: Sequence[Turn], system: str | list[ContentBlock] | None) -> list[Message]:
    """Returns the system prompt and the turns as messages of a chat, neighbours of one role as one.

    Raises ApiError 400 where there is no turn, and for blocks that stand nowhere there.
    """
    if not turns:
        raise wrong("messages", "messages is empty; wanted at least one turn")
    found = [] if system is None else [Message(role="system", content=_text("system", system))]
    for index, turn in enumerate(turns):
        where = f"messages[{index}].content"
        if isinstance(turn.content, str):
            found.append(Message(role=turn.role, content=turn.content))
        elif turn.role == "assistant":
            found.append(_said(where, turn.content))
        else:
            found += _asked(where, turn.content)
    return [message for role, group in groupby(found, _role) for message in _as_one(role, [*group])]


def _role(message: Message) -> str:
    return message.role


def _as_one(role: str, messages: list[Message]) -> list[Message]:
    if role == "tool" or len(messages) == 1:
        return messages
    contents = [message.content for message in messages if isinstance(message.content, str)]
    first = messages[0]
    return [
        Message(
            role=first.role,
            content="\n\n".join(contents) if contents else None,
            tool_calls=[call for message in messages for call in message.tool_calls or ()] or None,
            reasoning_content="".join(message.reasoning_content or "" for message in messages) or None,
        )
    ]


def _said(where: str, blocks: Sequence[ContentBlock]) -> Message:
    """Returns a turn of the assistant; what was thought and cannot be read is left out."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if block.type == "tool_use":
            arguments = block.input if block.input is not None else {}
            function = CalledFunction(name=_given(place, block, "name"), arguments=arguments)
            calls.append(ToolCall(id=_given(place, block, "id"), type="function", function=function))
        elif block.type == "thinking":
            thoughts.append(_given(place, block, "thinking"))
        elif block.type != "redacted_thinking":
            texts.append(text_of(place, block, "text", "tool_use", "thinking"))
    content = "".join(texts)
    return Message(
        role="assistant",
        content=content if content or not (calls or thoughts) else None,
        tool_calls=calls or None,
        reasoning_content="".join(thoughts) or None,
    )


def _asked(where: str, blocks: Sequence[ContentBlock]) -> list[Message]:
    """Returns a turn of the user: results of calls as messages of their own, in order, and texts between."""
    found: list[Message] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if block.type != "tool_result":
            texts.append(text_of(place, block, "text", "tool_result"))
            continue
        if texts:
            found.append(Message(role="user", content="".join(texts)))
            texts.clear()
        answered = _given(place, block, "tool_use_id")
        content = _text(f"{place}.content", block.content or "")
        found.append(Message(role="tool", tool_call_id=answered, content=content))
    if texts or not found:
        found.append(Message(role="user", content="".join(texts)))
    return found


def _given(where: str, block: ContentBlock, name: str) -> Any:
    value = getattr(block, name)
    if value is None:
        raise wrong(f"{where}.{name}", f"{where}.{name} is missing; it is required")
    return value


def _text(where: str, content: str | list[ContentBlock]) -> str:
    """Returns the text of all blocks; ApiError names the first that is none."""
    if isinstance(content, str):
        return content
    return "".join(text_of(f"{where}[{index}]", block, "text") for index, block in enumerate(content))
