"""The log of requests: a line of JSON for each once it is over, without text unless that is wanted."""

import contextlib
import dataclasses
import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...common.logging import get_logger
from ...runtime.sampling_params import SamplingParams
from ...runtime.structured_outputs import KINDS, StructuredOutputs
from ..config import ServeConfig
from .record import RequestRecord

if TYPE_CHECKING:
    from starlette.types import Scope

logger = get_logger("serving")
TEXTS = ("stop", "bad_words", *KINDS, "reasoning_end", "reasoning_begin")  # parameters that hold text
PROBES = ("/health", "/health/live", "/health/ready", "/metrics")
MOST_TEXT = 8192  # characters of a prompt or answer that are logged, and tokens of a prompt that are decoded
MOST_WAITING = 1000  # lines that wait to be written; further ones are dropped
SECONDS_TO_END = 2.0  # for lines that wait at the end

Line = dict[str, Any]
Decode = Callable[[str | None, Sequence[int]], str]


class RequestLog:
    """Writes the lines that the options --access-log, --log-requests and --log-text ask for.

    A thread writes them: a terminal or pipe that nobody reads holds it up, and never the event loop. Lines
    that come while too many wait are dropped, which is told with the next that is written, or at the end.
    """

    def __init__(self, *, wants_params: bool, wants_text: bool, decode: Decode) -> None:
        """decode: token ids of a model, by the name that it was asked by, to text, special tokens shown."""
        self._wants_params = wants_params
        self._wants_text = wants_text
        self._decode = decode
        self._logger = _lines()
        self._waiting: queue.Queue[Line | None] = queue.Queue(MOST_WAITING)
        self._num_dropped = 0
        self._thread: threading.Thread | None = None  # once there is a line

    @classmethod
    def of(cls, config: ServeConfig, decode: Decode) -> "RequestLog | None":
        """Returns the log that a server's config asks for, if any."""
        wants_params = config.log_requests or config.log_text
        if not (config.access_log or wants_params):
            return None
        return cls(wants_params=wants_params, wants_text=config.log_text, decode=decode)

    def write(self, scope: "Scope", route: str, record: RequestRecord) -> None:
        """Has the line of a request that is over written, soon; probes that succeed have none."""
        if route in PROBES and (record.status or 499) < 400:
            return
        line = access(scope, route, record)
        if self._wants_params and record.params is not None:
            line["params"] = chosen(record.params, with_text=self._wants_text)
        if self._wants_text:
            line["prompts"] = [each.prompt_token_ids[:MOST_TEXT] for each in record.generations]
            line["answers"] = [text[:MOST_TEXT] for each in record.generations for text in each.texts]
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="lamina-request-log", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._num_dropped += 1

    def close(self) -> None:
        """Waits a little for what is still to be written; says what was dropped, or is left."""
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=SECONDS_TO_END)
        self._thread.join(SECONDS_TO_END)
        if self._thread.is_alive():
            self._drop_waiting()
        self._tell_dropped()

    def _drop_waiting(self) -> None:
        """Leaves the thread to the line that holds it up, after which it ends."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._num_dropped += self._waiting.get_nowait() is not None
        self._waiting.put_nowait(None)

    def _write_all(self) -> None:
        """Writes line after line, until there is a None."""
        while (line := self._waiting.get()) is not None:
            try:
                self._write(line)
            except Exception:  # a tokenizer, a handler: the next line may do
                logger.exception("a request could not be logged")
            self._tell_dropped()

    def _write(self, line: Line) -> None:
        if "prompts" in line:
            line["prompts"] = [self._decode(line.get("model"), ids)[:MOST_TEXT] for ids in line["prompts"]]
        self._logger.info(json.dumps(line, default=list))  # sets of token ids

    def _tell_dropped(self) -> None:
        num_dropped, self._num_dropped = self._num_dropped, 0
        if num_dropped:
            reason = "they are read more slowly than they come"
            logger.warning("%d lines of the request log were dropped: %s", num_dropped, reason)


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
        if record.engines:
            line["engines"] = record.engines
    return line


def chosen(params: SamplingParams | StructuredOutputs, *, with_text: bool) -> Line:
    """Returns the parameters that were chosen; of those that are texts, without with_text, how long they are.

    A form of answers is logged in the same way, as a schema has names and texts of its client's.
    """
    line: Line = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        is_empty = field.default is None and hasattr(value, "__len__") and not len(value)
        if value == field.default or is_empty:
            continue
        if isinstance(value, StructuredOutputs):
            line[field.name] = chosen(value, with_text=with_text)
        elif field.name in TEXTS and not isinstance(value, bool):
            line[field.name] = value if with_text else len(value)
        else:
            line[field.name] = value
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
