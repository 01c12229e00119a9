"""The log of requests: a line of JSON for each once it is over, without text unless that is wanted."""

import dataclasses
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...common.logging import get_logger
from ...runtime.sampling_params import SamplingParams
from ..config import ServeConfig
from .record import RequestRecord

if TYPE_CHECKING:
    from starlette.types import Scope

logger = get_logger("serving")
TEXTS = ("stop", "bad_words")  # parameters that hold text
PROBES = ("/health", "/health/live", "/health/ready", "/metrics")
MOST_TEXT = 8192  # characters of a prompt or answer that are logged, and tokens of a prompt that are decoded


class RequestLog:
    """Writes the lines that the options --access-log, --log-requests and --log-text ask for."""

    def __init__(
        self, *, wants_params: bool, wants_text: bool, decode: Callable[[Sequence[int]], str]
    ) -> None:
        """decode: token ids to text, special tokens shown."""
        self._wants_params = wants_params
        self._wants_text = wants_text
        self._decode = decode
        self._logger = _lines()

    @classmethod
    def of(cls, config: ServeConfig, decode: Callable[[Sequence[int]], str]) -> "RequestLog | None":
        """Returns the log that a server's config asks for, if any."""
        wants_params = config.log_requests or config.log_text
        if not (config.access_log or wants_params):
            return None
        return cls(wants_params=wants_params, wants_text=config.log_text, decode=decode)

    def write(self, scope: "Scope", route: str, record: RequestRecord) -> None:
        """Writes the line of a request that is over; probes that succeed have none."""
        if route in PROBES and (record.status or 499) < 400:
            return
        line = access(scope, route, record)
        if self._wants_params and record.params is not None:
            line["params"] = chosen(record.params, with_text=self._wants_text)
        if self._wants_text:
            prompts = [each.prompt_token_ids[:MOST_TEXT] for each in record.generations]
            line["prompts"] = [self._decode(prompt)[:MOST_TEXT] for prompt in prompts]
            line["answers"] = [text[:MOST_TEXT] for each in record.generations for text in each.texts]
        self._logger.info(json.dumps(line, default=list))  # sets of token ids


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
        line["ends"] = record.ends
    return line


def chosen(params: SamplingParams, *, with_text: bool) -> dict[str, Any]:
    """Returns the parameters that were chosen; of those that are texts, without with_text, how many."""
    line = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        is_empty = field.default is None and hasattr(value, "__len__") and not len(value)
        if value != field.default and not is_empty:
            line[field.name] = len(value) if field.name in TEXTS and not with_text else value
    return line


class _Lines(logging.StreamHandler[Any]):
    """Writes lines; where that fails, as on a full disk, it says so once rather than all of each line."""

    has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Say why a line could not be written."""
        if not self.has_failed:
            self.has_failed = True
            logger.warning("lines of the request log are lost: %s", sys.exc_info()[1])


def _lines() -> logging.Logger:
    """Returns the logger lamina.requests, whose lines go to standard output unless it has a handler."""
    lines = logging.getLogger("lamina.requests")
    if not lines.handlers:
        handler = _Lines(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        lines.addHandler(handler)
        lines.setLevel(logging.INFO)
        lines.propagate = False
    return lines
