"""POST /v1/chat/completions: the next message of a conversation."""

from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..context import serving_of
from ..middleware.body import read_body
from ..protocol.chat import ChatRequest
from ..protocol.logprobs import chat_logprobs, token_names
from ..streaming.handlers import (
    beside_loop,
    receive,
    respond,
    response_id_of,
    response_settings,
    start,
)
from ..streaming.response_settings import CHAT, AnsweredPrompt, WriteLogprobs
from ..tools.plan import chat_plan

if TYPE_CHECKING:
    from ...runtime.engine.input_processor import InputProcessor


async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation, whole or as a stream of chunks."""
    received = await receive(request, ChatRequest, await read_body(request))
    given, serving = received.given, serving_of(request)
    processor = serving.runtime.input
    sampled = await beside_loop(received.is_large, given.sampling_params, serving.config)
    prompt = await beside_loop(received.is_large, given.prompt, processor, serving.config)
    plan = chat_plan(given, processor, serving.config, prompt)
    params = await beside_loop(received.is_large, plan.params, processor.chat_params(sampled))
    response_id = response_id_of(given.request_id, "chatcmpl")
    running = await start(request, received, [prompt], params, response_id, partial(plan.check, params))
    new_logprobs = partial(new_writer, processor, given) if given.logprobs else None
    new_reader = plan.new_reader if plan.reads else None
    own = {"new_logprobs": new_logprobs, "new_reader": new_reader}
    settings = response_settings(request, received, response_id, **own)
    answered = [AnsweredPrompt(token_ids=prompt, num_answers=given.n)]
    return await respond(request, received, running, settings, CHAT, answered)


def new_writer(processor: "InputProcessor", given: ChatRequest, _: str) -> WriteLogprobs:
    """Returns what writes the log-probabilities of one answer, which echoes nothing."""
    names = token_names(processor.tokenizer, by_id=given.return_tokens_as_token_ids)
    num_top = given.top_logprobs or 0
    return lambda _, found: chat_logprobs([own for own in found if own is not None], num_top, names)


ROUTES: list[BaseRoute] = [Route("/v1/chat/completions", create_chat_completion, methods=["POST"])]
