"""The OpenAPI document, made of the structs that bodies are decoded into and answers are held to."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from . import response_models
from .decoding import Body

REFUSALS = {
    "400": "a field that is wrong or not served; error.param names it",
    "401": "no key, or one that is not known",
    "403": "the key may not ask this",
    "404": "a model, or a path, that there is not",
    "413": "a body that is too large",
    "415": "a body that is no JSON",
    "429": "too many requests; Retry-After says when to come again",
    "503": "not ready, draining, or the engine is lost",
}
REF = "#/components/schemas/{name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """What is known of a route beside its path: its body, its answer, an event of its stream, its errors."""

    body: type[Body] | None = None
    answer: Any = response_models.Anything
    others: Mapping[str, Any] = field(default_factory=dict)  # of methods that answer something else
    event: Any = None
    error: Any = response_models.ErrorResponse
    media: str = "application/json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """A path as OpenAPI writes it, one method of it, and what its handler says it does."""

    path: str
    method: str
    description: str
    parameters: tuple[str, ...] = ()


def document(
    endpoints: Iterable[Endpoint], operations: Mapping[str, Operation], *, version: str
) -> dict[str, Any]:
    """Returns the document of a server's endpoints; operations: by path, of others any object is answered."""
    endpoints = list(endpoints)
    known = {each.path: operations.get(each.path, Operation()) for each in endpoints}
    kinds = [kind for each in known.values() for kind in _kinds(each)]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REF)
    schema_of = dict(zip(map(repr, kinds), schemas, strict=True))
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Body):
            _allow_null(components[kind.__name__])
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        described = _operation(each, known[each.path], schema_of)
        paths.setdefault(each.path, {})[each.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "Lamina", "version": version, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "security": [{"bearer": []}, {"key": []}],
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _kinds(operation: Operation) -> list[Any]:
    kinds = operation.body, operation.answer, *operation.others.values(), operation.event, operation.error
    return [kind for kind in kinds if kind is not None]


def _allow_null(schema: dict[str, Any]) -> None:
    """Lets null stand for every field that may be absent, as decode() takes it."""
    required = schema.get("required", ())
    for name, kind in schema["properties"].items():
        if name not in required and {"type": "null"} not in kind.get("anyOf", ()):
            default = {"default": kind.pop("default")} if "default" in kind else {}
            inner = kind.pop("anyOf", None) or [dict(kind)]
            kind.clear()
            kind.update({"anyOf": [*inner, {"type": "null"}], **default})


def _operation(endpoint: Endpoint, operation: Operation, schema_of: Mapping[str, Any]) -> dict[str, Any]:
    answer = operation.others.get(endpoint.method, operation.answer)
    content = {operation.media: {"schema": schema_of[repr(answer)]}}
    if operation.event is not None:
        content["text/event-stream"] = {"schema": _event(schema_of[repr(operation.event)])}
    error = {"application/json": {"schema": schema_of[repr(operation.error)]}}
    found: dict[str, Any] = {
        "operationId": f"{endpoint.method.lower()}_{endpoint.path.strip('/').translate(_PLAIN) or 'page'}",
        "summary": endpoint.description.partition("\n")[0],
        "responses": {
            "200": {"description": "the answer", "content": content},
            **{status: {"description": why, "content": error} for status, why in REFUSALS.items()},
        },
    }
    if endpoint.parameters:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in endpoint.parameters
        ]
    if operation.body is not None:
        body = {"application/json": {"schema": schema_of[repr(operation.body)]}}
        found["requestBody"] = {"required": True, "content": body}
    return found


def _event(data: Any) -> dict[str, Any]:
    """Returns the schema of a server-sent event whose data are JSON, but for [DONE] at the end."""
    text = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    fields = {"data": {"anyOf": [{"const": "[DONE]"}, text]}, "event": {"type": "string"}}
    return {"type": "object", "properties": fields, "required": ["data"]}


_PLAIN = str.maketrans({"/": "_", "{": "", "}": "", ".": "_", "-": "_"})
