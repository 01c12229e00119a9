"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens."""

import uuid

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ..context import serving_of
from ..middleware.body import read_body
from ..protocol.messages import Conversation, MessagesRequest
from ..streaming.answering import Received, beside_loop, receive, start, wait_for
from ..streaming.message_events import MessageEvents, Writing
from ..streaming.sse import EventStream
from .tokenize import conversation_ids, tokenizer_of


async def create_message(request: Request) -> Response:
    """Answers the turns of a conversation with a message, whole or as a stream of events."""
    asked = await receive(request, MessagesRequest, await read_body(request))
    received = Received(
        given=asked.given.chat(), model=asked.model, headers=asked.headers, is_large=asked.is_large
    )
    chat, serving = received.given, serving_of(request)
    params = serving.runtime.input.chat_params(chat.sampling_params(serving.config))
    prompt = await beside_loop(asked.is_large, chat.prompt, serving.runtime.input, serving.config)
    writing = Writing(id=f"msg_{uuid.uuid4().hex}", model=asked.model, max_tokens=asked.given.max_tokens)
    running = await start(request, received, [prompt], params, writing.id)
    if chat.stream:
        events = MessageEvents(writing, running.usage)
        return EventStream(running, events, serving.config, asked.headers)
    (output,) = await wait_for(request, running)
    (answer,) = output.outputs
    message = writing.whole(answer, running.usage(len(answer.token_ids)))
    return JSONResponse(message, headers=asked.headers)


async def count_tokens(request: Request) -> Response:
    """Answers {input_tokens}: those of the prompt that a message of these turns would answer."""
    received = await receive(request, Conversation, await read_body(request))
    token_ids = await beside_loop(
        received.is_large,
        conversation_ids,
        tokenizer_of(serving_of(request)),
        msgspec.to_builtins(received.given.chat_messages()),
        continue_final_message=received.given.continues,
    )
    return JSONResponse({"input_tokens": len(token_ids)}, headers=received.headers)


ROUTES: list[BaseRoute] = [
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
