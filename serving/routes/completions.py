"""POST /v1/completions: what follows each of one or many prompts."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..context import serving_of
from ..middleware.body import read_body
from ..protocol.completions import CompletionRequest
from ..protocol.decoding import wrong
from ..protocol.logprobs import CompletionLogprobsWriter, token_names
from ..streaming.handlers import (
    beside_loop,
    receive,
    respond,
    response_id_of,
    response_settings,
    start,
)
from ..streaming.response_settings import COMPLETION, AnsweredPrompt, WriteLogprobs

if TYPE_CHECKING:
    from ...runtime.engine.input_processor import InputProcessor


async def create_completion(request: Request) -> Response:
    """Goes on with each prompt, whole or as a stream of chunks."""
    received = await receive(request, CompletionRequest, await read_body(request))
    given, serving = received.given, serving_of(request)
    processor = serving.runtime.input
    params = given.sampling_params(serving.config)
    prompts = await beside_loop(received.is_large, given.prompts, processor, serving.config)
    texts = [""] * len(prompts)
    if given.echo:
        texts = await beside_loop(received.is_large, echoed, processor, given, prompts)
    response_id = response_id_of(given.request_id, "cmpl")
    running = await start(request, received, prompts, params, response_id)
    new_logprobs = None if given.logprobs is None else partial(new_writer, processor, given)
    own = {"new_logprobs": new_logprobs, "echo": given.echo, "omits_answer": given.writes_nothing}
    settings = response_settings(request, received, response_id, **own)
    answered = [
        AnsweredPrompt(token_ids=prompt, num_answers=given.n, text=text)
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    return await respond(request, received, running, settings, COMPLETION, answered)


def new_writer(processor: "InputProcessor", given: CompletionRequest, echoed: str) -> WriteLogprobs:
    """Returns what writes the log-probabilities of one answer, whose text begins with what is echoed."""
    tokenizer, skips = processor.tokenizer, given.skip_special_tokens
    special = tokenizer.special_tokens if tokenizer is not None and skips else {}
    return CompletionLogprobsWriter(
        num_top=given.logprobs or 0,
        names=token_names(tokenizer, by_id=given.return_tokens_as_token_ids),
        is_skipped=special.__contains__,
        echoed=echoed,
        loses_space=given.echo and tokenizer is not None and tokenizer.loses_first_space,
    ).write


def echoed(
    processor: "InputProcessor", given: CompletionRequest, prompts: Sequence[Sequence[int]]
) -> list[str]:
    """Returns the texts of prompts: as given, where all of it is the prompt, else of its tokens."""
    tokenizer = processor.tokenizer
    if tokenizer is None:
        raise wrong("echo", "echo is true, but the model has no tokenizer to make a text of the prompt")
    if given.truncate_prompt_tokens is None and all(isinstance(text, str) for text in given.texts()):
        return [str(text) for text in given.texts()]
    return [tokenizer.decode(prompt, given.skip_special_tokens) for prompt in prompts]


ROUTES: list[BaseRoute] = [Route("/v1/completions", create_completion, methods=["POST"])]
