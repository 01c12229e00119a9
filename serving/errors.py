"""Errors as OpenAI's clients read them: one JSON shape, whatever went wrong and wherever."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..common.errors import (
    ClosedError,
    DrainedError,
    EngineDeadError,
    LaminaError,
    PromptTooLongError,
    RequestError,
    UnknownAdapterError,
    UnsupportedError,
)

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    431: "request_too_large",
    429: "rate_limit_error",
    499: "client_closed_request",
    500: "server_error",
    503: "overloaded_error",
}
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_TYPES = {  # where its names differ
    "server_error": "api_error",
    "method_not_allowed": "invalid_request_error",
    "unsupported_media_type": "invalid_request_error",
}

RETRY_AFTER = {"Retry-After": "10"}


@dataclass(kw_only=True, eq=False)
class ApiError(Exception):
    """What a client is answered in place of what it asked for.

    param: the field of the body that is wrong, as messages[0].content. code: a string that programs
    compare, as context_length_exceeded.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def type(self) -> str:
        """The kind of the error, by its status."""
        return TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self, path: str = "") -> bytes:
        """Returns {"error": {message, type, param, code}} as JSON of ASCII characters.

        path: of the request; for Anthropic's clients it is {"type": "error", "error": {type, message}}.
        """
        if path.startswith(ANTHROPIC_PATH):
            kind = ANTHROPIC_TYPES.get(self.type, self.type)
            shape = {"type": "error", "error": {"type": kind, "message": self.message}}
        else:
            error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
            shape = {"error": error}
        return json.dumps(shape, separators=(",", ":")).encode()


def api_error(error: Exception) -> ApiError:
    """Returns the answer to an error of the library; what nobody expected is a 500 that tells nothing."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLongError):
        message = f"This model's maximum context length is exceeded: {error}"  # LiteLLM looks for these words
        return ApiError(status=400, message=message, code="context_length_exceeded")
    if isinstance(error, UnknownAdapterError):
        return ApiError(status=404, message=str(error), param="model", code="model_not_found")
    if isinstance(error, RequestError):
        return ApiError(status=400, message=str(error))
    if isinstance(error, UnsupportedError):
        return ApiError(status=400, message=str(error), code="unsupported")
    if isinstance(error, ClosedError):
        return ApiError(
            status=503, message="the server is shutting down", code="draining", headers=RETRY_AFTER
        )
    if isinstance(error, DrainedError):
        return ApiError(status=503, message=str(error), code="model_drained", headers=RETRY_AFTER)
    if isinstance(error, EngineDeadError):
        return ApiError(status=503, message="the engine is lost", code="engine_lost", headers=RETRY_AFTER)
    if isinstance(error, LaminaError):
        return ApiError(status=500, message=str(error), code=type(error).__name__)
    return ApiError(status=500, message="an internal error; the server's log has it", code="internal_error")
