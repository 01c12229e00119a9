"""How the answers to one request are written: by what the request asks, in the shape of its endpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...runtime.engine.logprobs import Logprob
from ..tools.reader import AnswerReader

Found = Mapping[int, Logprob] | None  # of one token; None: of a prompt's first
WriteLogprobs = Callable[[Sequence[int], Sequence[Found]], Any]  # of the next tokens of one answer


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseSettings:
    """What of a request decides how its answers are written."""

    id: str
    created: int  # seconds since 1970
    model: str  # by the name that the client used
    fingerprint: str | None
    include_usage: bool = False
    continuous_usage: bool = False
    timing: Callable[[], Mapping[str, float]] | None = None  # milliseconds by phase, where a stream has them
    stream_interval: int = 1  # tokens of a chunk at least, but for the first and the last
    return_token_ids: bool = False
    # Makes who writes those of one answer behind the text that it echoes, if any; None: nobody wants them.
    new_logprobs: Callable[[str], WriteLogprobs] | None = None
    new_reader: Callable[[], AnswerReader] | None = None  # of one answer, where there is more in it than text
    tells_prompt_logprobs: bool = False  # in a field of their own; whole answers alone do
    echo: bool = False  # text and log-probabilities of a prompt come before those of its answers
    omits_answer: bool = False  # the prompt alone is wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredPrompt:
    """A prompt, as far as its answers tell of it."""

    token_ids: tuple[int, ...]
    num_answers: int = 1
    text: str = ""  # where it is to be echoed


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
