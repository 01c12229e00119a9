"""Whole answers of chats and completions."""

from collections.abc import Sequence
from typing import Any

from ...runtime.engine.logprobs import Logprobs
from ...runtime.engine.outputs import CompletionOutput, RequestOutput
from .asked import Asked, Told
from .styles import Style


def whole_answer(
    asked: Asked,
    style: Style,
    prompts: Sequence[Told],
    outputs: Sequence[RequestOutput],
    usage: dict[str, Any],
) -> dict[str, Any]:
    """Returns the answers to all prompts as plain data; choices count on from prompt to prompt."""
    answers = [
        (prompt, output, answer)
        for prompt, output in zip(prompts, outputs, strict=True)
        for answer in output.outputs
    ]
    choices = [
        {"index": index, **_choice(asked, style, prompt, output, answer)}
        for index, (prompt, output, answer) in enumerate(answers)
    ]
    ids = {"prompt_token_ids": prompts[0].token_ids}
    return {
        "id": asked.id,
        "object": style.object,
        "created": asked.created,
        "model": asked.model,
        "system_fingerprint": asked.fingerprint,
        "choices": choices,
        "usage": usage,
        **(ids if asked.return_token_ids and not style.prompt_ids_in_choice else {}),
    }


def _choice(
    asked: Asked, style: Style, prompt: Told, output: RequestOutput, answer: CompletionOutput
) -> dict[str, Any]:
    token_ids, text, reason = answer.token_ids, answer.text, answer.finish_reason
    logprobs: Sequence[Logprobs | None] = answer.logprobs or ()
    if asked.omits_answer:
        token_ids, text, logprobs, reason = (), "", (), "length"
    choice: dict[str, Any] = {
        **style.content(prompt.text + text if asked.echo else text),
        "logprobs": None,
        "finish_reason": reason,
        "stop_reason": None if asked.omits_answer else answer.stop_reason,
    }
    if asked.return_token_ids:
        choice["token_ids"] = token_ids
        if style.prompt_ids_in_choice:
            choice["prompt_token_ids"] = prompt.token_ids
    if asked.wants_logprobs:
        if asked.echo:
            token_ids = (*prompt.token_ids, *token_ids)
            logprobs = (*(output.prompt_logprobs or ()), *logprobs)
        choice["logprobs"], _ = style.logprobs(token_ids, logprobs, 0)
    return choice
