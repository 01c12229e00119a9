"""OpenAI's Responses API: POST /v1/responses, and GET, DELETE and cancelling of one by its id."""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..auth.key import key_of
from ..context import Serving, serving_of
from ..middleware.body import read_body
from ..protocol.chat import Message
from ..protocol.decoding import wrong
from ..protocol.response_objects import (
    DeletedResponse,
    ResponseObject,
    ResponseReasoning,
    ResponseText,
)
from ..protocol.responses import InputItem, ResponsesRequest, renamed, turns_of
from ..served_models import models_of
from ..stored_responses import Stored
from ..streaming.handlers import (
    LARGE_ANSWER,
    LARGE_BODY,
    Received,
    beside_loop,
    receive,
    start,
    wait_for,
)
from ..streaming.response_events import STATUS, ResponseEvents, Writing
from ..streaming.running import Running
from ..streaming.sse import EventStream
from ..tools.plan import chat_plan

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from ...runtime.sampling_params import SamplingParams

MOST_WAITED = 5.0  # seconds in which a response that is cancelled ends, but for one whose client reads slowly


async def create_response(request: Request) -> Response:
    """Answers a conversation with a response, whole or as a stream of events; kept if store is true."""
    asked = await receive(request, ResponsesRequest, await read_body(request))
    given, serving, key = asked.given, serving_of(request), key_of(request).name
    before = _conversation(serving, key, given.previous_response_id)
    is_large = asked.is_large or len(before) > LARGE_BODY
    turns = await beside_loop(is_large, _turns, before, given)
    with renamed():
        received = Received(
            given=given.chat(turns),
            model=asked.model,
            adapter=asked.adapter,
            headers=asked.headers,
            is_large=is_large,
        )
        chat, processor = received.given, serving.runtime.input
        params = processor.chat_params(chat.sampling_params(serving.config))
        prompt = await beside_loop(is_large, chat.prompt, processor, serving.config)
        plan = chat_plan(chat, processor, serving.config, prompt)
        params = plan.params(params)
        begun = _begun(asked, params)
        kept = msgspec.json.encode(begun), msgspec.json.encode(turns if given.store else [])
        if given.store:
            serving.responses.check_room(sum(map(len, kept)))
        running = await start(request, received, [prompt], params, begun.id, partial(plan.check, params))
    stored = Stored(key=key, id=begun.id, response=kept[0], turns=kept[1], is_kept=given.store)
    serving.responses.begin(stored)
    writing = Writing(begun, plan.new_reader(), _keeper(serving, stored, turns))
    if not given.stream:
        return await _whole(request, running, writing, stored, received.headers)
    events = ResponseEvents(writing, running.usage)
    drop = partial(serving.responses.drop, stored)
    return _Left(EventStream(running, events, serving.config, received.headers), events, drop)


async def get_response(request: Request) -> Response:
    """Answers a stored response as it stands; 404 where this key has none of the id."""
    for name in request.query_params:
        raise wrong(name, f"{name} is given; a stored response is answered whole, so leave it out")
    return _json(_find(request).response)


async def delete_response(request: Request) -> Response:
    """Answers {id, object, deleted}, and keeps a stored response no longer; it is written on if it runs."""
    stored = _find(request)
    serving_of(request).responses.forget(stored)
    return _json(msgspec.json.encode(DeletedResponse(id=stored.id)))


async def cancel_response(request: Request) -> Response:
    """Ends a response that is being written, and answers it; a stored one that has ended as it is."""
    key, response_id = key_of(request), request.path_params["id"]
    serving = serving_of(request)
    stored = serving.responses.running(key.name, response_id) or _find(request)
    if not stored.ended.is_set():
        await models_of(request).abort(key, response_id)
        ended = asyncio.ensure_future(stored.ended.wait())
        await asyncio.wait([ended], timeout=MOST_WAITED)
        ended.cancel()
    return _json(stored.response)


class _Left(Response):
    """A stream of a response that is cancelled where its client leaves, and dropped if nothing was sent."""

    def __init__(self, inner: Response, events: ResponseEvents, drop: Callable[[], None]) -> None:
        self._inner, self._events, self._drop = inner, events, drop
        self.background = None

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        try:
            await self._inner(scope, receive, send)
        finally:
            if self._events.is_begun:
                self._events.leave()
            else:
                self._drop()


async def _whole(
    request: Request, running: Running, writing: Writing, stored: Stored, headers: dict[str, str]
) -> Response:
    try:
        (output,) = await wait_for(request, running)
    except BaseException:
        serving_of(request).responses.drop(stored)
        raise
    (answer,) = output.outputs
    num_tokens = len(answer.token_ids)
    writing.add(await beside_loop(num_tokens > LARGE_ANSWER, writing.reader.whole, answer.text))
    writing.end(STATUS[answer.finish_reason], running.usage(num_tokens))
    return _json(stored.response, headers)


def _begun(asked: Received[ResponsesRequest], params: "SamplingParams") -> ResponseObject:
    given = asked.given
    return ResponseObject(
        id=f"resp_{uuid.uuid4().hex}",
        created_at=int(time.time()),
        status="in_progress",
        instructions=given.instructions,
        max_output_tokens=given.max_output_tokens,
        metadata=given.metadata or {},
        model=asked.model,
        previous_response_id=given.previous_response_id,
        reasoning=ResponseReasoning(effort=None if given.reasoning is None else given.reasoning.effort),
        store=given.store,
        temperature=params.temperature,
        text=ResponseText(format=given.format),
        top_p=params.top_p,
        tools=given.tools or [],
        tool_choice=given.tool_choice or ("auto" if given.tools else "none"),
        parallel_tool_calls=given.parallel_tool_calls,
    )


def _keeper(serving: Serving, stored: Stored, turns: Sequence[Message]) -> Callable[[ResponseObject], None]:
    def keep(response: ResponseObject) -> None:
        items = msgspec.convert(msgspec.to_builtins(response.output), list[InputItem])
        whole = [*turns, *turns_of(items)] if stored.is_kept else []
        serving.responses.end(stored, answer=msgspec.json.encode(response), turns=msgspec.json.encode(whole))

    return keep


def _conversation(serving: Serving, key: str, response_id: str | None) -> bytes:
    """Returns the messages of a stored response, as JSON; ApiError 400 for one that is not there or done."""
    if response_id is None:
        return b"[]"
    stored = serving.responses.kept(key, response_id)
    if stored is None:
        what = f"previous_response_id is {response_id[:128]!r}, which is not stored for this key"
        raise wrong(
            "previous_response_id",
            f"{what}; wanted the id of a response with store: true",
            code="previous_response_not_found",
        )
    if not stored.ended.is_set():
        raise wrong("previous_response_id", "previous_response_id is of a response that is being written")
    return stored.turns


def _turns(before: bytes, given: ResponsesRequest) -> list[Message]:
    return [*msgspec.json.decode(before, type=list[Message]), *given.turns()]


def _find(request: Request) -> Stored:
    return serving_of(request).responses.find(key_of(request).name, request.path_params["id"])


def _json(body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, media_type="application/json", headers=headers)


ROUTES: list[BaseRoute] = [
    Route("/v1/responses", create_response, methods=["POST"]),
    Route("/v1/responses/{id}", get_response, methods=["GET"]),
    Route("/v1/responses/{id}", delete_response, methods=["DELETE"]),
    Route("/v1/responses/{id}/cancel", cancel_response, methods=["POST"]),
]
