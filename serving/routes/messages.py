"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens."""

import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ..context import Serving, serving_of
from ..middleware.body import read_body
from ..protocol.decoding import wrong
from ..protocol.messages import Conversation, MessagesRequest, renamed
from ..protocol.tool_fields import check_tools
from ..streaming.handlers import LARGE_ANSWER, NOT_ENFORCED, Received, beside_loop, receive, start, wait_for
from ..streaming.message_events import MessageEvents, Writing
from ..streaming.sse import EventStream
from ..tools.formats import reasoning_tags
from ..tools.plan import chat_plan
from .tokenize import conversation_ids, tokenizer_of

if TYPE_CHECKING:
    from ..protocol.chat import ChatRequest


async def create_message(request: Request) -> Response:
    """Answers the turns of a conversation with a message, whole or as a stream of events."""
    asked = await receive(request, MessagesRequest, await read_body(request))
    serving = serving_of(request)
    with renamed():
        received = Received(
            given=_chat(asked.given, serving),
            model=asked.model,
            adapter=asked.adapter,
            headers=asked.headers,
            is_large=asked.is_large,
        )
        chat, processor = received.given, serving.runtime.input
        params = processor.chat_params(chat.sampling_params(serving.config))
        prompt = await beside_loop(asked.is_large, chat.prompt, processor, serving.config)
        plan = chat_plan(chat, processor, serving.config, prompt)
        params = await beside_loop(asked.is_large, plan.params, params)
        writing = Writing(
            id=f"msg_{uuid.uuid4().hex}",
            model=asked.model,
            max_tokens=asked.given.max_tokens,
            new_reader=plan.new_reader,
        )
        running = await start(request, received, [prompt], params, writing.id, partial(plan.check, params))
    _tell_of_budget(asked.given, asked.headers)
    if chat.stream:
        events = MessageEvents(writing, running.usage)
        return EventStream(running, events, serving.config, asked.headers)
    (output,) = await wait_for(request, running)
    (answer,) = output.outputs
    is_large = plan.reads and len(answer.token_ids) > LARGE_ANSWER
    message = await beside_loop(is_large, writing.whole, answer, running.usage(len(answer.token_ids)))
    return JSONResponse(message, headers=asked.headers)


async def count_tokens(request: Request) -> Response:
    """Answers {input_tokens}: those of the prompt that a message of these turns would answer."""
    received = await receive(request, Conversation, await read_body(request))
    serving = serving_of(request)
    with renamed():
        chat = _chat(received.given, serving)
        check_tools(chat.tools, chat.tool_choice)
        token_ids = await beside_loop(
            received.is_large,
            conversation_ids,
            tokenizer_of(serving),
            msgspec.to_builtins(chat.messages),
            continue_final_message=chat.continue_final_message,
            template_kwargs=chat.chat_template_kwargs,
            tools=msgspec.to_builtins(chat.offered_tools) or None,
        )
    return JSONResponse({"input_tokens": len(token_ids)}, headers=received.headers)


def _tell_of_budget(given: Conversation, headers: dict[str, str]) -> None:
    """Adds to the headers that a budget of thinking is not enforced, where there is one."""
    if given.thinking is not None and given.thinking.budget_tokens is not None:
        others = headers.get(NOT_ENFORCED)
        headers[NOT_ENFORCED] = f"{others}; thinking.budget_tokens" if others else "thinking.budget_tokens"


def _chat(given: Conversation, serving: Serving) -> "ChatRequest":
    """Returns the request for a chat; ApiError where the model is to think and its template has no place."""
    variables: dict[str, Any] = {}
    if given.reasons is not None:
        tokenizer = tokenizer_of(serving)
        tags = reasoning_tags(serving.config.reasoning_parser, tokenizer.chat_templates)
        if given.reasons and tags is None:
            message = "thinking is enabled, which this model's chat template does not know; leave it out"
            raise wrong("thinking", message, code="unsupported_field")
        if serving.runtime.input.template_reads("enable_thinking", None):
            variables["enable_thinking"] = given.reasons
    return given.chat(chat_template_kwargs=variables or None)


ROUTES: list[BaseRoute] = [
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
