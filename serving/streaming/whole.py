"""Whole answers of chats and completions."""

from collections.abc import Sequence
from typing import Any

from ...runtime.engine.outputs import CompletionOutput, RequestOutput
from ..protocol.logprobs import prompt_logprobs
from ..protocol.usage import Usage
from ..tools.reader import message_of
from .response_settings import AnsweredPrompt, Found, ResponseSettings, Style


def whole_response(
    settings: ResponseSettings,
    style: Style,
    prompts: Sequence[AnsweredPrompt],
    outputs: Sequence[RequestOutput],
    usage: Usage,
) -> dict[str, Any]:
    """Returns the answers to all prompts as plain data; choices count on from prompt to prompt."""
    answers = [
        (prompt, output, answer)
        for prompt, output in zip(prompts, outputs, strict=True)
        for answer in output.outputs
    ]
    choices = [
        {"index": index, **_choice(settings, style, prompt, output, answer)}
        for index, (prompt, output, answer) in enumerate(answers)
    ]
    return {
        "id": settings.id,
        "object": style.object,
        "created": settings.created,
        "model": settings.model,
        "system_fingerprint": settings.fingerprint,
        "choices": choices,
        "usage": usage,
        **({} if style.prompt_in_choice else _of_prompt(settings, prompts[0], outputs[0])),
    }


def _choice(
    settings: ResponseSettings,
    style: Style,
    prompt: AnsweredPrompt,
    output: RequestOutput,
    answer: CompletionOutput,
) -> dict[str, Any]:
    text, stop = answer.text, answer.stop_reason
    reason: str | None = answer.finish_reason
    token_ids, found = answer.token_ids, answer.logprobs or ()
    if settings.omits_answer:
        text, reason, stop, token_ids, found = "", "length", None, (), ()
    if settings.new_reader is not None:
        reader = settings.new_reader()
        content: dict[str, Any] = {"message": message_of(reader, text)}
        reason = "tool_calls" if reader.has_calls and reason == "stop" else reason
    else:
        content = style.content(prompt.text + text if settings.echo else text)
    return {
        **content,
        "logprobs": _logprobs(settings, prompt, output, token_ids, found),
        "finish_reason": reason,
        "stop_reason": stop,
        **({"token_ids": token_ids} if settings.return_token_ids else {}),
        **(_of_prompt(settings, prompt, output) if style.prompt_in_choice else {}),
    }


def _logprobs(
    settings: ResponseSettings,
    prompt: AnsweredPrompt,
    output: RequestOutput,
    token_ids: Sequence[int],
    found: Sequence[Found],
) -> Any:
    if settings.new_logprobs is None:
        return None
    if settings.echo:
        token_ids = (*prompt.token_ids, *token_ids)
        found = (*(output.prompt_logprobs or ()), *found)
    return settings.new_logprobs(prompt.text)(token_ids, found)


def _of_prompt(settings: ResponseSettings, prompt: AnsweredPrompt, output: RequestOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if settings.return_token_ids:
        fields["prompt_token_ids"] = prompt.token_ids
    if settings.tells_prompt_logprobs:
        fields["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or ())
    return fields
