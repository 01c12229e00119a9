"""The log of requests: a line of JSON for each once it is over, without text unless that is wanted."""

import dataclasses
import json
import logging
import sys
import time
from typing import TYPE_CHECKING, Any

from ...runtime.sampling_params import SamplingParams
from .record import RequestRecord

if TYPE_CHECKING:
    from starlette.types import Scope

TEXTS = ("stop", "bad_words")  # parameters that hold text
MOST_TEXT = 8192  # characters of a prompt that are logged


class RequestLog:
    """Writes the lines that the options --access-log, --log-requests and --log-text ask for."""

    def __init__(self, *, wants_params: bool = False, wants_text: bool = False) -> None:
        self._wants_params = wants_params
        self._wants_text = wants_text
        self._logger = _lines()

    def write(self, scope: "Scope", route: str, record: RequestRecord) -> None:
        """Writes the line of a request that is over."""
        line = access(scope, route, record)
        if self._wants_params and record.params is not None:
            line["params"] = chosen(record.params, with_text=self._wants_text)
        if self._wants_text:
            line["prompts"] = [(each.prompt or "")[:MOST_TEXT] for each in record.generations]
        self._logger.info(json.dumps(line, default=str))


def access(scope: "Scope", route: str, record: RequestRecord) -> dict[str, Any]:
    """Returns who asked what, how it ended and what it took; the client's words only as names and ids."""
    key = scope.get("lamina.key")
    line: dict[str, Any] = {
        "time": round(time.time(), 3),
        "id": scope.get("lamina.request_id"),
        "key": getattr(key, "name", None),
        "method": scope["method"],
        "route": route,
        "status": record.status or 499,
        "code": record.code,
        "ms": record.timing(),
    }
    if record.generations:
        line["model"] = record.model
        line["prompt_tokens"] = record.num_prompt_tokens
        line["cached_tokens"] = record.num_cached_tokens
        line["output_tokens"] = record.num_output_tokens
        line["ends"] = ends(record)
    return line


def ends(record: RequestRecord) -> list[str]:
    """Returns why each answer that has ended did so, prompt by prompt: a finish reason, or "error"."""
    return ["error" if request.error else str(request.finish_reason) for request in record.finished]


def chosen(params: SamplingParams, *, with_text: bool) -> dict[str, Any]:
    """Returns the parameters that were chosen; of those that are texts, without with_text, how many."""
    line = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value != field.default:
            line[field.name] = len(value) if field.name in TEXTS and not with_text else value
    return line


def _lines() -> logging.Logger:
    """Returns the logger lamina.requests; its lines go to standard output unless it has a handler."""
    logger = logging.getLogger("lamina.requests")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger
