"""Chunks of chats and completions as server-sent events, by templates: no object is made for a token."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted  # U+2028 too, at which some clients end a line
from typing import Any

import msgspec

from ...runtime.engine.outputs import StreamDelta
from ..errors import ApiError
from ..tools.parts import Part, merged
from ..tools.reader import AnswerReader
from .response_settings import AnsweredPrompt, Found, ResponseSettings, Style, WriteLogprobs

DONE = "data: [DONE]\n\n"


@dataclass(slots=True, eq=False)
class _Choice:
    """One answer, as far as it has been written."""

    prompt: int  # the number of what it answers
    open: str  # what a chunk of nothing but text begins with
    close: str  # and ends with
    is_started: bool = False
    held: StreamDelta | None = None  # what waits for more
    write_logprobs: WriteLogprobs | None = None  # None: they are not wanted
    reader: AnswerReader | None = None  # where there is more in it than text


class ChunkEvents:
    """The events of one stream, whose deltas have the index of a choice."""

    def __init__(
        self,
        settings: ResponseSettings,
        style: Style,
        prompts: Sequence[AnsweredPrompt],
        usage: Callable[[int], Any],
    ) -> None:
        """usage: the usage once so many tokens have been told. Choices count on from prompt to prompt."""
        self._settings, self._style, self._prompts, self._usage_at = settings, style, prompts, usage
        self._head = (
            f'data: {{"id":{quoted(settings.id)},"object":"{style.chunk_object}",'
            f'"created":{settings.created},"model":{quoted(settings.model)},'
            f'"system_fingerprint":{json.dumps(settings.fingerprint)},"choices":['
        )
        before, after = style.around_next
        close = f'{after},"logprobs":null,"finish_reason":null}}]}}\n\n'
        numbers = [number for number, prompt in enumerate(prompts) for _ in range(prompt.num_answers)]
        self._choices = [
            _Choice(
                number,
                f'{self._head}{{"index":{index},{before}',
                close,
                write_logprobs=settings.new_logprobs and settings.new_logprobs(prompts[number].text),
                reader=settings.new_reader and settings.new_reader(),
            )
            for index, number in enumerate(numbers)
        ]
        is_plain = settings.stream_interval == 1 and not (
            settings.new_reader
            or settings.new_logprobs
            or settings.return_token_ids
            or settings.continuous_usage
            or settings.omits_answer
        )
        self._is_plain = is_plain
        self.write_text: Callable[[str, int], bytes] | None = (
            self._write_text if is_plain and len(self._choices) == 1 else None
        )
        self._prompt_logprobs: dict[int, Sequence[Found]] = {}  # by the prompt's number
        self._num_tokens = 0  # told so far

    def write(self, deltas: Sequence[StreamDelta]) -> bytes:
        """Returns the chunks of what is new: of text, where it is there, and one for the end of a choice."""
        events: list[str] = []
        for delta in deltas:
            choice = self._choices[delta.index]
            if self._is_plain and choice.is_started and delta.finish_reason is None:
                self._num_tokens += len(delta.token_ids)
                if delta.text:
                    events.append(choice.open + quoted(delta.text) + choice.close)
            else:
                self._add(events, choice, delta)
        return "".join(events).encode()

    def _write_text(self, text: str, num_tokens: int) -> bytes:
        """Returns the chunk of a text of the only choice, which has begun."""
        self._num_tokens += num_tokens
        choice = self._choices[0]
        return (choice.open + quoted(text) + choice.close).encode() if text else b""

    def end(self) -> bytes:
        """Returns usage and timing, if they are wanted, and the mark of the end."""
        fields = f',"usage":{self._usage()}' if self._settings.include_usage else ""
        if self._settings.timing is not None:
            fields += f',"timing":{json.dumps(self._settings.timing())}'
        last = f"{self._head}]{fields}}}\n\n" if fields else ""
        return (last + DONE).encode()

    def fail(self, error: ApiError) -> bytes:
        """Returns an error in place of what would follow, and the mark of the end."""
        return b"data: " + error.body() + b"\n\n" + DONE.encode()

    def _add(self, events: list[str], choice: _Choice, delta: StreamDelta) -> None:
        if choice.held is not None:
            delta, choice.held = joined(choice.held, delta), None
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs.setdefault(choice.prompt, delta.prompt_logprobs)
        if self._waits(choice, delta):
            choice.held = delta
            return
        if self._settings.omits_answer:
            delta = without_answer(delta)
        self._num_tokens += len(delta.token_ids)
        shows_tokens = self._settings.return_token_ids or self._settings.new_logprobs
        if choice.reader is not None:
            events += self._read_pieces(choice, choice.reader, delta, bool(shows_tokens and delta.token_ids))
        elif not choice.is_started or delta.text or (shows_tokens and delta.token_ids):
            events.append(self._piece(choice, delta))
        if delta.finish_reason is not None:
            events.append(self._last(choice, delta))
        if delta.prompt_logprobs is not None:
            self._add_held(events, choice.prompt)

    def _add_held(self, events: list[str], prompt: int) -> None:
        """Adds what has waited for the log-probabilities of a prompt, which its first answer brings."""
        for choice in self._choices:
            if choice.prompt == prompt and choice.held is not None:
                held, choice.held = choice.held, None
                self._add(events, choice, held)

    def _waits(self, choice: _Choice, delta: StreamDelta) -> bool:
        settings = self._settings
        if not choice.is_started:
            needs_prompt = settings.echo and settings.new_logprobs is not None
            return needs_prompt and choice.prompt not in self._prompt_logprobs
        return delta.finish_reason is None and len(delta.token_ids) < settings.stream_interval

    def _read_pieces(
        self, choice: _Choice, reader: AnswerReader, delta: StreamDelta, shows_tokens: bool
    ) -> list[str]:
        """The chunks of what a piece of text is read as; the first has what is told of its tokens."""
        parts = reader.feed(delta.text)
        if delta.finish_reason is not None:
            parts = merged([*parts, *reader.finish()])
        fields = [_fields_of(part, reader) for part in parts]
        if not choice.is_started:
            fields.insert(0, '"role":"assistant","content":""')
        elif not fields and shows_tokens:
            fields = [""]
        without_tokens = dataclasses.replace(delta, token_ids=(), logprobs=None)
        return [
            self._piece(choice, delta if place == 0 else without_tokens, each)
            for place, each in enumerate(fields)
        ]

    def _piece(self, choice: _Choice, delta: StreamDelta, fields: str | None = None) -> str:
        """A chunk of text; fields: of its delta, where it has other ones."""
        settings, is_first = self._settings, not choice.is_started
        choice.is_started = True
        echoes = is_first and settings.echo
        text = self._prompts[choice.prompt].text + delta.text if echoes else delta.text
        before, after = self._style.around_first if is_first else self._style.around_next
        content = f"{before}{quoted(text)}{after}" if fields is None else f'"delta":{{{fields}}}'
        logprobs = self._logprobs(choice, delta, echoes)
        chunk_fields = choice_fields = ""
        if settings.return_token_ids:
            choice_fields = f',"token_ids":{json.dumps(delta.token_ids)}'
            if is_first:
                token_ids = self._prompts[choice.prompt].token_ids
                prompt_ids = f',"prompt_token_ids":{json.dumps(token_ids)}'
                if self._style.prompt_in_choice:
                    choice_fields += prompt_ids
                else:
                    chunk_fields = prompt_ids
        return (
            f'{self._head}{{"index":{delta.index},{content},"logprobs":{logprobs},'
            f'"finish_reason":null{choice_fields}}}]{chunk_fields}{self._usage_so_far()}}}\n\n'
        )

    def _last(self, choice: _Choice, delta: StreamDelta) -> str:
        """The last chunk of a choice, whose text has been told by one before: clients drop either."""
        has_calls = choice.reader is not None and choice.reader.has_calls
        reason = "tool_calls" if has_calls and delta.finish_reason == "stop" else delta.finish_reason
        return (
            f'{self._head}{{"index":{delta.index},{self._style.without_text},"logprobs":null,'
            f'"finish_reason":"{reason}","stop_reason":{json.dumps(delta.stop_reason)}}}]'
            f"{self._usage_so_far()}}}\n\n"
        )

    def _logprobs(self, choice: _Choice, delta: StreamDelta, echoes: bool) -> str:
        if choice.write_logprobs is None or (delta.logprobs is None and choice.reader is not None):
            return "null"
        token_ids: Sequence[int] = delta.token_ids
        found: Sequence[Found] = delta.logprobs or ()
        if echoes:
            token_ids = (*self._prompts[choice.prompt].token_ids, *token_ids)
            found = (*self._prompt_logprobs[choice.prompt], *found)
        return _ascii_json(choice.write_logprobs(token_ids, found))

    def _usage_so_far(self) -> str:
        return f',"usage":{self._usage()}' if self._settings.continuous_usage else ""

    def _usage(self) -> str:
        return _ascii_json(self._usage_at(self._num_tokens))


def _fields_of(part: Part, reader: AnswerReader) -> str:
    """Returns the fields of a delta that tells of a part."""
    if part.kind == "content":
        return f'"content":{quoted(part.text)}'
    if part.kind == "reasoning":
        return f'"reasoning_content":{quoted(part.text)}'
    if part.kind == "arguments":
        return f'"tool_calls":[{{"index":{part.index},"function":{{"arguments":{quoted(part.text)}}}}}]'
    call = f'"index":{part.index},"id":"{reader.new_id()}","type":"function"'
    return f'"tool_calls":[{{{call},"function":{{"name":{quoted(part.text)},"arguments":""}}}}]'


def _ascii_json(value: Any) -> str:
    """Returns a struct as JSON in one line, whatever a client takes for the end of a line."""
    text = msgspec.json.encode(value).decode()
    return text if text.isascii() else json.dumps(msgspec.to_builtins(value), separators=(",", ":"))


def without_answer(delta: StreamDelta) -> StreamDelta:
    """Returns a delta as if no token had been asked for."""
    nothing: dict[str, Any] = {"text": "", "token_ids": (), "logprobs": None, "stop_reason": None}
    return dataclasses.replace(delta, **nothing, finish_reason=delta.finish_reason and "length")


def joined(first: StreamDelta, second: StreamDelta) -> StreamDelta:
    """Returns two pieces of one answer, the second next to the first, as one."""
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = (*(first.logprobs or ()), *(second.logprobs or ()))
    return StreamDelta(
        request_id=first.request_id,
        index=first.index,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
    )
