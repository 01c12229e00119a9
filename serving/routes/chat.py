"""POST /v1/chat/completions: the next message of a conversation."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..context import serving_of
from ..middleware.body import read_body
from ..protocol.chat import ChatRequest
from ..protocol.logprobs import chat_logprobs
from ..streaming.answering import answer, asked_of, beside_loop, receive, start, token_names
from ..streaming.asked import Told, WriteLogprobs
from ..streaming.styles import CHAT


async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation, whole or as a stream of chunks."""
    received = await receive(request, ChatRequest, await read_body(request))
    given, serving = received.given, serving_of(request)
    processor = serving.runtime.input
    names, num_top = token_names(processor, given.return_tokens_as_token_ids), given.top_logprobs or 0

    def new_logprobs() -> WriteLogprobs:
        return lambda _, found: chat_logprobs([each for each in found if each], num_top, names)

    params = processor.chat_params(given.sampling_params(serving.config))
    prompt = await beside_loop(received.is_large, given.prompt, processor, serving.config)
    asked = await asked_of(
        request, received, "chatcmpl", new_logprobs=new_logprobs if given.logprobs else None
    )
    running = await start(request, received, [prompt], params, asked.id)
    told = [Told(token_ids=prompt, num_answers=given.n)]
    return await answer(request, received, running, asked, CHAT, told)


ROUTES: list[BaseRoute] = [Route("/v1/chat/completions", create_chat_completion, methods=["POST"])]
