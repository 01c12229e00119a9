"""From a checked request to its answer: admitted, given to the engine, and written whole or as it comes."""

import asyncio
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import msgspec
from starlette.responses import Response

from ...common.errors import RequestError, clipped
from ..admission.connection import while_connected
from ..context import choose, serving_of
from ..metrics.record import record_of
from ..protocol.decoding import Body, decode_async
from ..protocol.generation import (
    GenerationRequest,
    check_form,
    check_num_sequences,
    check_prompt_logprobs,
    named_error,
)
from ..served_models import models_of, require_loaded
from .events import ChunkEvents
from .response_settings import AnsweredPrompt, ResponseSettings, Style
from .running import Running
from .sse import EventStream
from .whole import whole_response

if TYPE_CHECKING:
    from starlette.requests import Request

    from ...runtime.engine.outputs import RequestOutput
    from ...runtime.sampling_params import SamplingParams

LARGE_BODY = 32 * 1024  # bytes from which a prompt is made of it beside the event loop
NUM_AT_ONCE = 16  # prompts of a request that are queued before the loop comes round
LARGE_ANSWER = 1024  # tokens from which an answer with log-probabilities or calls is written beside it
NOT_ENFORCED = "X-Lamina-Not-Enforced"  # a header

Kind = TypeVar("Kind", bound=GenerationRequest)
AnyKind = TypeVar("AnyKind", bound=Body)
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Received(Generic[AnyKind]):
    """A request, decoded and for a model that is served."""

    given: AnyKind
    model: str  # the name that the client asked by
    adapter: str | None = None  # likewise, where that is an adapter's
    headers: dict[str, str]  # of the answer
    is_large: bool  # to make a prompt of it takes long


async def receive(request: "Request", kind: type[AnyKind], body: bytes) -> Received[AnyKind]:
    """Returns the body of a request, decoded; ApiError for one that is none of this kind."""
    decoded = await decode_async(kind, body, strict=serving_of(request).config.strict_fields)
    model = await chosen_model(request, decoded.request.model)
    serving = serving_of(request)
    return Received(
        given=decoded.request,
        model=model,
        adapter=None if model in serving.config.model_names else model,
        headers=decoded.headers,
        is_large=len(body) > LARGE_BODY,
    )


async def chosen_model(request: "Request", name: str | None) -> str:
    """Returns the name that an answer carries: as it was asked by, of a model or an adapter, or the first.

    Of several models it is chosen for the request. Raises ApiError 404 model_not_found for a name that is
    not served.
    """
    models = models_of(request)
    serving = await models.find_or_load(name)
    choose(request, serving)
    chosen = serving.config.model_names[0] if name is None else name
    await require_loaded(request, serving, chosen)
    return chosen


async def beside_loop(is_large: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns what the function returns, called in a thread where that takes long, so that others go on."""
    if is_large:
        return await asyncio.to_thread(function, *args, **kwargs)
    return function(*args, **kwargs)


def response_id_of(request_id: str | None, prefix: str) -> str:
    """Returns the id of the response, which begins so: the client's own behind that, else a fresh one."""
    return f"{prefix}-{request_id or os.urandom(16).hex()}"


def response_settings(
    request: "Request", received: Received[Kind], response_id: str, **own: Any
) -> ResponseSettings:
    """Returns how the answers are to be written, under that id; own: further fields."""
    given, serving = received.given, serving_of(request)
    return ResponseSettings(
        id=response_id,
        created=int(time.time()),
        model=received.model,
        fingerprint=serving.fingerprint,
        include_usage=given.include_usage,
        continuous_usage=given.continuous_usage,
        timing=record_of(request).timing if given.include_timing else None,
        stream_interval=given.stream_interval,
        return_token_ids=given.return_token_ids,
        tells_prompt_logprobs=given.prompt_logprobs is not None,
        **own,
    )


async def start(
    request: "Request",
    received: Received[Kind],
    prompts: "Sequence[tuple[int, ...]]",
    params: "SamplingParams",
    response_id: str,
    check: Callable[[], Sequence[str]] | None = None,
) -> Running:
    """Returns the answers to all prompts, admitted and queued; who calls it ends them by aclose().

    prompts: as the input processor's prompt_ids() returns them. response_id: by which an abort finds them.
    check: compiles the form of answers, in a thread, and returns what it leaves out; otherwise that of the
    request's own fields. Raises ApiError for what is refused, and nothing runs then.
    """
    given, model, serving = received.given, received.model, serving_of(request)
    if params.structured_outputs is not None:
        check = check or partial(check_form, given, params, serving.runtime.input)
        left_out = await asyncio.to_thread(check)
        received.headers.update(_not_enforced(left_out))
    num_prompt_tokens = sum(map(len, prompts))
    check_prompt_logprobs(params, num_prompt_tokens, serving.config)
    lease = await serving.admission.admit(
        request,
        num_sequences=check_num_sequences(given, len(prompts), serving.config),
        num_prompt_tokens=num_prompt_tokens,
        priority=given.priority,
        model=model,
    )
    options = given.options(floor=lease.priority, timeout=lease.timeout, adapter=received.adapter)
    own_id = f"{response_id}-{lease.number}"  # no other's, whatever ids clients choose
    generations = []
    for number, prompt in enumerate(prompts, start=1):
        if number % NUM_AT_ONCE == 0:
            await asyncio.sleep(0)
        try:
            asked = serving.runtime.input.prepare_ids(prompt, params, options, own_id)
            generation = serving.runtime.queue(asked)
        except RequestError as error:  # Leases ends those before
            raise named_error(error) from error
        lease.attach(generation, response_id)
        record_of(request).begin(generation, params, model)
        generations.append(generation)
    return Running(generations, lease)


def _not_enforced(left_out: Sequence[str]) -> dict[str, str]:
    """A header that tells what of a form is not enforced, in printable characters; none where all is."""
    listed = "; ".join(re.sub(r"[^ -~]+", " ", each) for each in left_out)
    return {NOT_ENFORCED: clipped(listed, 1000)} if listed else {}


async def wait_for(request: "Request", running: Running) -> "list[RequestOutput]":
    """Returns the whole answers, and ends them: within a step, too, once the client has gone."""
    try:
        return await while_connected(request.receive, running.outputs())
    finally:
        await running.aclose()


async def respond(
    request: "Request",
    received: Received[Kind],
    running: Running,
    settings: ResponseSettings,
    style: Style,
    prompts: Sequence[AnsweredPrompt],
) -> Response:
    """Returns the response of a chat or completion, whole or as a stream."""
    if received.given.stream:
        events = ChunkEvents(settings, style, prompts, running.usage)
        return EventStream(running, events, serving_of(request).config, received.headers)
    outputs = await wait_for(request, running)
    num_tokens = 0 if settings.omits_answer else sum(len(a.token_ids) for o in outputs for a in o.outputs)
    usage = running.usage(num_tokens)

    def written() -> bytes:
        return msgspec.json.encode(whole_response(settings, style, prompts, outputs, usage))

    is_large = (
        settings.new_logprobs or settings.new_reader
    ) is not None and running.num_prompt_tokens + num_tokens > LARGE_ANSWER
    body = await beside_loop(is_large, written)
    return Response(body, media_type="application/json", headers=received.headers)
