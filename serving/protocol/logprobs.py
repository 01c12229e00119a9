"""Log-probabilities as OpenAI's clients read them, of chats and of completions: always finite numbers."""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ...runtime.engine.logprobs import IMPOSSIBLE, Logprob
from ...runtime.tokenization.tokenizer import Tokenizer

HALF = "\ufffd"  # what text has in place of half a character
Found = Mapping[int, Logprob] | None  # of one token: the token itself first, then the likeliest


class TopLogprob(msgspec.Struct, kw_only=True, frozen=True):
    """One of the likeliest tokens in a place."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, kw_only=True, frozen=True):
    """A token of an answer, with the likeliest in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True, frozen=True):
    """Log-probabilities of an answer of a chat."""

    content: list[TokenLogprob] | None


class CompletionLogprobs(msgspec.Struct, kw_only=True, frozen=True):
    """Log-probabilities of a completion, a list a token; of a first token of a prompt there are none."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, kw_only=True, frozen=True):
    """A token in a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenNames:
    """How tokens are named: by their text, or as token_id:5; bytes_of gives a token's own bytes."""

    bytes_of: Callable[[int], bytes]
    by_id: bool = False

    def name(self, token_id: int) -> str:
        """Returns what a token is called; bytes that are no whole characters stand as they do in text."""
        return f"token_id:{token_id}" if self.by_id else self.bytes_of(token_id).decode(errors="replace")


def token_names(tokenizer: Tokenizer | None, *, by_id: bool = False) -> TokenNames:
    """Returns how a tokenizer's tokens are named; without one by their ids."""
    if tokenizer is None:
        return TokenNames(bytes_of=lambda token_id: b"", by_id=True)
    return TokenNames(bytes_of=tokenizer.bytes_of, by_id=by_id)


def finite(logprob: float) -> float:
    """Returns a log-probability as JSON can hold it: one of a token that cannot be is -9999."""
    return logprob if logprob > IMPOSSIBLE else IMPOSSIBLE  # NaN, too


def chat_logprobs(found: Iterable[Mapping[int, Logprob]], num_top: int, names: TokenNames) -> ChatLogprobs:
    """Returns those of some tokens of an answer, each with so many of the likeliest."""
    return ChatLogprobs(content=[_token(each, num_top, names) for each in found])


def prompt_logprobs(found: Sequence[Found]) -> list[dict[str, PromptLogprob] | None]:
    """Returns those of a prompt as vLLM writes them: by token id, None for the first token."""
    return [None if each is None else _place(each) for each in found]


def _place(found: Mapping[int, Logprob]) -> dict[str, PromptLogprob]:
    return {
        str(token_id): PromptLogprob(
            logprob=finite(own.logprob), rank=own.rank, decoded_token=own.decoded_token
        )
        for token_id, own in found.items()
    }


@dataclass(kw_only=True, slots=True)
class CompletionLogprobsWriter:
    """Writes those of one completion, piece by piece: offsets count characters from the text's beginning."""

    num_top: int
    names: TokenNames
    is_skipped: Callable[[int], bool] = lambda token_id: False  # tokens that an answer's text leaves out
    echoed: str = ""  # what the text begins with, as a client wrote it: such tokens may stand in it
    loses_space: bool = False  # whether the text begins without the space of its first token
    _offset: int = 0
    _special_end: int = 0  # of the last special token in what is echoed
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def write(self, token_ids: Sequence[int], found: Sequence[Found]) -> CompletionLogprobs:
        """Returns those of the next tokens, of prompt or answer; found: None for a prompt's first."""
        piece = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token_id, own in zip(token_ids, found, strict=True):
            is_special = self.is_skipped(token_id)
            piece.text_offset.append(self._place_special(token_id) if is_special else self._place(token_id))
            piece.tokens.append(self.names.name(token_id))
            piece.token_logprobs.append(None if own is None else finite(own[token_id].logprob))
            piece.top_logprobs.append(None if own is None else self._top(own))
        return piece

    def _place_special(self, token_id: int) -> int:
        """Returns where the echoed text has a token that an answer's leaves out, or the next one's place.

        A token ahead of it may have had a space more than the text, so it may be before the offset.
        """
        name = self.names.bytes_of(token_id).decode(errors="replace")
        place = self.echoed.find(name, self._special_end) if name else -1
        if not 0 <= place <= self._offset:
            return self._offset
        self._offset = self._special_end = place + len(name)
        return place

    def _place(self, token_id: int) -> int:
        """Returns the character at which a token of the text begins, and goes on behind it.

        A token within a character is at that character; one behind half a character is behind its sign.
        """
        before, own = self._decoder.getstate()[0], self.names.bytes_of(token_id)
        text = self._decoder.decode(own)
        is_behind_half = before and text.startswith(HALF) and not (before + own).startswith(HALF.encode())
        place = self._offset + (len(before.decode(errors="replace")) if is_behind_half else 0)
        if text and self.loses_space:
            text, self.loses_space = text.removeprefix(" "), False
        self._offset += len(text)
        return place

    def _top(self, found: Mapping[int, Logprob]) -> dict[str, float]:
        """Returns the likeliest by name, and the token itself; of tokens of one name the likelier counts."""
        named: dict[str, float] = {}
        for token_id, own in found.items():
            if own.rank <= self.num_top or token_id == next(iter(found)):
                name = self.names.name(token_id)
                named[name] = max(named.get(name, IMPOSSIBLE), finite(own.logprob))
        return named


def _token(found: Mapping[int, Logprob], num_top: int, names: TokenNames) -> TokenLogprob:
    first = next(iter(found))
    top = sorted((own.rank, token_id) for token_id, own in found.items() if own.rank <= num_top)
    return TokenLogprob(
        token=names.name(first),
        logprob=finite(found[first].logprob),
        bytes=list(names.bytes_of(first)),
        top_logprobs=[
            TopLogprob(
                token=names.name(token_id),
                logprob=finite(found[token_id].logprob),
                bytes=list(names.bytes_of(token_id)),
            )
            for _, token_id in top
        ],
    )
