"""What tells a chat's answers from a completion's, whole or in chunks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """One shape of answers: names, and how a choice holds its text."""

    object: str  # the name of a whole answer
    chunk_object: str  # and of a chunk
    content: Callable[[str], dict[str, Any]]  # a choice's field for its whole text
    around_first: tuple[str, str]  # what of a choice stands before the text of its first chunk, and behind it
    around_next: tuple[str, str]  # and of those that follow
    without_text: str  # what stands there in the last, which has none
    prompt_in_choice: bool  # whether what is told of a prompt is told in each choice, else of the whole


def _message(text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text, "refusal": None}}


def _text(text: str) -> dict[str, Any]:
    return {"text": text}


CHAT = Style(
    object="chat.completion",
    chunk_object="chat.completion.chunk",
    content=_message,
    around_first=('"delta":{"role":"assistant","content":', "}"),
    around_next=('"delta":{"content":', "}"),
    without_text='"delta":{}',
    prompt_in_choice=False,
)
COMPLETION = Style(
    object="text_completion",
    chunk_object="text_completion",
    content=_text,
    around_first=('"text":', ""),
    around_next=('"text":', ""),
    without_text='"text":""',
    prompt_in_choice=True,
)
