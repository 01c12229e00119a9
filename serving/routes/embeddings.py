"""POST /v1/embeddings: the vector of each text."""

from base64 import b64encode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ...runtime.engine.pooling_outputs import floats, result_of
from ..context import serving_of
from ..middleware.body import read_body
from ..protocol.pooling import EmbeddingRequest, texts_of
from ..streaming.handlers import beside_loop, receive
from ..streaming.pooling import Pooled, named_errors, pool


async def create_embeddings(request: Request) -> Response:
    """Answers the vectors of one or many texts, as lists of numbers or as float32 in base64."""
    received = await receive(request, EmbeddingRequest, await read_body(request))
    given, serving = received.given, serving_of(request)
    processor = serving.runtime.pooling
    with named_errors():
        spec = processor.spec_for("embed")
        params = processor.vector_params(given.dimensions, given.normalize)
        planned = processor.texts(spec, texts_of(given.input, serving.config), given.text_options(), "input")
    pooled = await pool(request, received, planned, params, "embd")
    return await beside_loop(pooled.is_large, _answer, pooled, given.encoding_format == "base64")


def _answer(pooled: Pooled, is_base64: bool) -> Response:
    results = [result_of(output) for output in pooled.outputs]
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": b64encode(result).decode() if is_base64 else floats(result),
        }
        for index, result in enumerate(results)
    ]
    return pooled.listed(data)


ROUTES: list[BaseRoute] = [Route("/v1/embeddings", create_embeddings, methods=["POST"])]
