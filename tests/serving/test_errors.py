"""Errors on the wire: OpenAI's shape, and Anthropic's where its clients ask."""

import json

import pytest

from lamina.common.errors import ClosedError, LogitsError, RequestError
from lamina.serving.errors import ApiError, api_error


def test_an_error_has_openais_shape_everywhere_but_on_anthropics_routes() -> None:
    error = ApiError(status=404, message="no model ünknown", param="model", code="model_not_found")
    shown = {
        "message": "no model ünknown",
        "type": "not_found_error",
        "param": "model",
        "code": "model_not_found",
    }
    for path in ("", "/v1/chat/completions", "/v1/message", "/"):
        assert json.loads(error.body(path)) == {"error": shown}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        told = {"type": "not_found_error", "message": "no model ünknown"}
        assert json.loads(error.body(path)) == {"type": "error", "error": told}
    assert error.body().isascii()


@pytest.mark.parametrize(
    "status,kind",
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_anthropics_clients_read_kinds_that_they_know(status: int, kind: str) -> None:
    told = json.loads(ApiError(status=status, message="m").body("/v1/messages"))
    assert told["error"]["type"] == kind


def test_what_a_client_sent_wrong_is_400_and_what_nobody_expected_tells_nothing() -> None:
    assert api_error(RequestError("n is 0")).status == 400
    assert api_error(ClosedError("closed")).status == 503
    assert api_error(LogitsError("NaN")).status == 500
    hidden = api_error(ValueError("/secret/path"))
    assert hidden.status == 500
    assert b"secret" not in hidden.body()
