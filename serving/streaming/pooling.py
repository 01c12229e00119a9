"""From a request for vectors, classes or scores to its results: texts as token ids, admitted and pooled."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
from starlette.responses import Response

from ...common.errors import RequestError
from ..context import serving_of
from ..metrics.record import record_of
from ..protocol.decoding import placed
from ..protocol.generation import named_error
from ..protocol.pooling import PoolingRequest
from ..protocol.usage import Usage
from .handlers import NUM_AT_ONCE, Received, beside_loop, response_id_of, wait_for
from .running import Running

if TYPE_CHECKING:
    from starlette.requests import Request

    from ...runtime.engine.outputs import RequestOutput
    from ...runtime.engine.pooling_processor import Planned
    from ...runtime.pooling_params import PoolingParams

MANY_TEXTS = 16  # from which on they are made token ids beside the event loop
LARGE_ANSWER = 1 << 16  # bytes of results from which an answer is written beside it
Kind = TypeVar("Kind", bound=PoolingRequest)


class Pooled(NamedTuple):
    """What came of the texts of a request, and how its answer begins."""

    id: str
    model: str
    created: int
    outputs: "list[RequestOutput]"
    usage: Usage
    headers: dict[str, str]

    def response(self, body: Any) -> Response:
        """Returns the answer, of plain data or structs."""
        encoded = msgspec.json.encode(body)
        return Response(encoded, media_type="application/json", headers=self.headers)

    def listed(self, data: Sequence[Any]) -> Response:
        """Returns an answer that has something of each text or pair, in order."""
        head = {"id": self.id, "object": "list", "created": self.created, "model": self.model}
        return self.response({**head, "data": data, "usage": self.usage})

    @property
    def is_large(self) -> bool:
        """Whether to write the answer takes long."""
        return sum(len(answer.pooled or b"") for o in self.outputs for answer in o.outputs) > LARGE_ANSWER


async def pool(
    request: "Request",
    received: Received[Kind],
    planned: "Sequence[Planned]",
    params: "PoolingParams",
    prefix: str,
) -> Pooled:
    """Returns what becomes of the texts, in order, under an id that begins so.

    Raises ApiError for what is refused, naming the text, and nothing runs then.
    """
    given, serving = received.given, serving_of(request)
    many = received.is_large or len(planned) > MANY_TEXTS
    prompts = await beside_loop(many, _token_ids, planned)
    response_id = response_id_of(given.request_id, prefix)
    lease = await serving.admission.admit(
        request,
        num_sequences=len(prompts),
        num_prompt_tokens=sum(map(len, prompts)),
        priority=given.priority,
        model=received.model,
    )
    options = given.options(floor=lease.priority, timeout=lease.timeout)
    runtime, generations = serving.runtime, []
    for number, prompt in enumerate(prompts, start=1):
        if number % NUM_AT_ONCE == 0:
            await asyncio.sleep(0)
        asked = runtime.pooling.request(prompt, params, options)
        generation = runtime.pool(asked, request_id=f"{response_id}-{lease.number}")
        lease.attach(generation, response_id)
        record_of(request).begin(generation, asked.submissions[0].request.params, received.model)
        generations.append(generation)
    running = Running(generations, lease)
    outputs = await wait_for(request, running)
    return Pooled(response_id, received.model, int(time.time()), outputs, running.usage(0), received.headers)


@contextmanager
def named_errors() -> Iterator[None]:
    """Has errors of the library about what was asked name the field of the request."""
    try:
        yield
    except RequestError as error:
        raise named_error(error) from None


def _token_ids(planned: "Sequence[Planned]") -> list[tuple[int, ...]]:
    prompts = []
    for text in planned:
        try:
            prompts.append(text.token_ids())
        except RequestError as error:
            raise placed(error, text.place) from None
    return prompts
