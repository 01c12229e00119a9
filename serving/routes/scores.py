"""How well documents answer a query: POST /v1/score, pair by pair, and /v1/rerank, the best first."""

from collections.abc import Sequence
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ...runtime.engine.pooling_outputs import ScoreOutput
from ..context import serving_of
from ..middleware.body import read_body
from ..protocol.pooling import RerankRequest, ScoreRequest, check_number
from ..streaming.handlers import Received, receive
from ..streaming.pooling import Pooled, named_errors, pool

AnyPairs = TypeVar("AnyPairs", ScoreRequest, RerankRequest)


async def score(request: Request) -> Response:
    """Answers the score of each document for a query, or of each pair of texts."""
    received = await receive(request, ScoreRequest, await read_body(request))
    given = received.given
    queries, documents = given.pairs()
    names = (
        "text_1" if given.queries is None else "queries",
        "text_2" if given.documents is None else "documents",
    )
    pooled, scores = await _scored(request, received, queries, documents, names)
    data = [{"object": "score", "index": each.index, "score": each.score} for each in scores]
    return pooled.listed(data)


async def rerank(request: Request) -> Response:
    """Answers the documents that answer a query best, the best first."""
    received = await receive(request, RerankRequest, await read_body(request))
    given = received.given
    documents = given.texts()
    pooled, scores = await _scored(request, received, [given.query], documents, ("query", "documents"))
    best = sorted(scores, key=lambda each: -each.score)[: given.top_n]
    results = [
        {
            "index": each.index,
            "relevance_score": each.score,
            **({"document": {"text": documents[each.index]}} if given.return_documents else {}),
        }
        for each in best
    ]
    return pooled.response(
        {"id": pooled.id, "model": pooled.model, "results": results, "usage": pooled.usage}
    )


async def _scored(
    request: Request,
    received: Received[AnyPairs],
    queries: Sequence[str],
    documents: Sequence[str],
    names: tuple[str, str],
) -> tuple[Pooled, list[ScoreOutput]]:
    """What the pairs came to; names: what the request calls queries and documents."""
    given, serving = received.given, serving_of(request)
    processor = serving.runtime.pooling
    for where, texts in zip(names, (queries, documents), strict=True):
        check_number(where, texts, serving.config)
    with named_errors():
        spec = processor.spec_for("score")
        params = processor.own_params(spec, given.activation)
        planned, parts = processor.pairs(spec, queries, documents, given.text_options(), names)
    pooled = await pool(request, received, planned, params, "score")
    return pooled, processor.scores(pooled.outputs, parts)


ROUTES: list[BaseRoute] = [
    *(Route(path, score, methods=["POST"]) for path in ("/v1/score", "/score")),
    *(Route(path, rerank, methods=["POST"]) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
]
