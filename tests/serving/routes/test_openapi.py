"""The OpenAPI document: true to the OpenAPI of JSON schemas, whole, and of the server that gives it."""

import jsonschema
import pytest

from lamina.serving.app import create_app
from lamina.serving.routes.openapi import OPERATIONS, endpoints_of

USER = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def document(server):
    """The document as the shared server gives it."""
    return server.client.get("/openapi.json").raise_for_status().json()


@pytest.fixture(scope="module")
def endpoints(server):
    """What a server like the shared one answers at."""
    return list(endpoints_of(create_app(server.server.models, server.server.lifecycle).routes))


def test_every_route_of_the_server_is_in_it(document, endpoints):
    assert len(endpoints) > 10
    for endpoint in endpoints:
        assert document["paths"][endpoint.path][endpoint.method.lower()]["summary"], endpoint


def test_every_path_that_is_described_exists(endpoints):
    assert set(OPERATIONS) <= {endpoint.path for endpoint in endpoints}


def test_every_route_that_reads_a_body_says_which(document):
    bodiless = ("/abort", "/cancel", "/sleep", "/wake_up", "/drain", "/resume")
    for path, methods in document["paths"].items():
        if "post" in methods and not path.endswith(bodiless):
            assert "requestBody" in methods["post"], path


def test_schemas_are_schemas_and_every_reference_leads_somewhere(document):
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    references = list(_references(document))
    assert len(references) > 20
    for reference in references:
        assert reference.removeprefix("#/components/schemas/") in schemas


def test_the_kind_of_every_answer_is_told(server, document):
    for path, methods in document["paths"].items():
        if "get" in methods and "{" not in path:
            kind = server.client.get(path).headers["content-type"].partition(";")[0]
            assert list(methods["get"]["responses"]["200"]["content"]) == [kind], path


def test_operations_have_names_of_their_own(document):
    names = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(names)


def test_bodies_that_follow_it_are_answered_and_null_stands_for_nothing(server, document):
    schemas = document["components"]["schemas"]
    for path, name, body in (
        ("/v1/completions", "CompletionRequest", {"prompt": "a", "max_tokens": 1}),
        ("/v1/chat/completions", "ChatRequest", {"messages": [USER], "max_tokens": 1}),
        ("/v1/responses", "ResponsesRequest", {"input": "a", "max_output_tokens": 1}),
    ):
        fields = schemas[name]["properties"]
        nothing = dict.fromkeys(fields.keys() - body.keys())
        validator = jsonschema.Draft202012Validator(
            {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        )
        given = {**nothing, **body}
        validator.validate(given)
        answer = server.client.post(path, json=given)
        assert answer.status_code == 200, answer.text


def _references(value):
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from _references(item)
    elif isinstance(value, list):
        for item in value:
            yield from _references(item)
