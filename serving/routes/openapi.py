"""GET /openapi.json: every route of this server, with the bodies that it takes and what it answers."""

import re
from collections.abc import Iterable, Iterator
from inspect import isfunction
from mimetypes import guess_type

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ... import __version__
from ..protocol import adapters, admin, messages, pooling, response_models, response_objects, tokenize
from ..protocol.chat import ChatRequest
from ..protocol.completions import CompletionRequest
from ..protocol.openapi import Endpoint, Operation, document
from ..protocol.responses import ResponsesRequest

PARAMETER = re.compile(r"\{(\w+)(:\w+)?\}")
OPERATIONS = {
    "/v1/chat/completions": Operation(
        body=ChatRequest, answer=response_models.ChatCompletion, event=response_models.ChatChunk
    ),
    "/v1/completions": Operation(
        body=CompletionRequest, answer=response_models.Completion, event=response_models.Completion
    ),
    "/v1/messages": Operation(
        body=messages.MessagesRequest,
        answer=messages.MessageResponse,
        event=messages.MessageEvent,
        error=messages.MessageErrorResponse,
    ),
    "/v1/messages/count_tokens": Operation(
        body=messages.Conversation, answer=messages.TokenCount, error=messages.MessageErrorResponse
    ),
    "/v1/responses": Operation(
        body=ResponsesRequest, answer=response_objects.ResponseObject, event=response_objects.ResponseEvent
    ),
    "/v1/responses/{id}": Operation(
        answer=response_objects.ResponseObject, others={"DELETE": response_objects.DeletedResponse}
    ),
    "/v1/responses/{id}/cancel": Operation(answer=response_objects.ResponseObject),
    "/v1/embeddings": Operation(body=pooling.EmbeddingRequest, answer=pooling.Embeddings),
    "/classify": Operation(body=pooling.ClassificationRequest, answer=pooling.Classifications),
    **dict.fromkeys(("/v1/score", "/score"), Operation(body=pooling.ScoreRequest, answer=pooling.Scores)),
    **dict.fromkeys(
        ("/v1/rerank", "/v2/rerank", "/rerank"),
        Operation(body=pooling.RerankRequest, answer=pooling.Ranking),
    ),
    "/tokenize": Operation(body=tokenize.TokenizeRequest, answer=tokenize.Tokenized),
    "/detokenize": Operation(body=tokenize.DetokenizeRequest, answer=tokenize.Detokenized),
    "/tokenizer_info": Operation(answer=tokenize.TokenizerInfo),
    "/v1/load_lora_adapter": Operation(body=adapters.LoadAdapterRequest, answer=str, media="text/plain"),
    "/v1/unload_lora_adapter": Operation(body=adapters.UnloadAdapterRequest, answer=str, media="text/plain"),
    "/v1/models": Operation(answer=response_models.ModelList),
    "/v1/models/{id}": Operation(answer=response_models.ModelEntry),
    "/version": Operation(answer=response_models.Version),
    "/health": Operation(answer=response_models.Ready),
    "/health/ready": Operation(answer=response_models.Ready),
    "/health/live": Operation(answer=response_models.Live),
    "/sleep": Operation(answer=admin.Sleeping),
    "/wake_up": Operation(answer=admin.Sleeping),
    "/is_sleeping": Operation(answer=admin.Sleeping),
    "/engines": Operation(answer=admin.Engines),
    "/engines/{engine}/drain": Operation(answer=admin.Engine),
    "/engines/{engine}/resume": Operation(answer=admin.Engine),
    "/update_weights": Operation(body=admin.UpdateWeightsRequest, answer=admin.Updated),
    "/metrics": Operation(answer=str, media="text/plain"),
}


async def openapi(request: Request) -> Response:
    """Answers the OpenAPI document of this server."""
    routes = request.app.routes
    made = document(endpoints_of(routes), files_of(routes) | OPERATIONS, version=__version__)
    return Response(msgspec.json.encode(made), media_type="application/json")


def endpoints_of(routes: Iterable[BaseRoute]) -> Iterator[Endpoint]:
    """Yields each method of each route of the API; HEAD goes with GET, and is not written apart."""
    for route in routes:
        if isinstance(route, Route) and route.include_in_schema:
            for method in sorted((route.methods or {"GET"}) - {"HEAD"}):
                yield Endpoint(
                    path=PARAMETER.sub(r"{\1}", route.path),
                    method=method,
                    description=_described(route),
                    parameters=tuple(name for name, _ in PARAMETER.findall(route.path)),
                )


def files_of(routes: Iterable[BaseRoute]) -> dict[str, Operation]:
    """Returns what is known of routes that answer a file, by path."""
    files = [route for route in routes if isinstance(route, Route) and not isfunction(route.endpoint)]
    kinds = {route.path: guess_type(route.name)[0] or "application/octet-stream" for route in files}
    return {path: Operation(answer=str, media=kind) for path, kind in kinds.items()}


def _described(route: Route) -> str:
    return route.endpoint.__doc__ or "" if isfunction(route.endpoint) else f"The file {route.name}."


ROUTES: list[BaseRoute] = [Route("/openapi.json", openapi, methods=["GET"])]
