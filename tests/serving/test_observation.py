"""What is told of a single request: Server-Timing, timing of a stream, a line of log, and spans."""

import contextlib
import io
import json
import logging
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lamina.common.errors import ConfigError, UnsupportedError
from lamina.serving.config import ServeConfig
from lamina.serving.metrics import request_log
from lamina.serving.metrics.request_log import MOST_TEXT, RequestLog
from lamina.serving.metrics.tracing import Tracing

from ..engine_gate import comes_true
from .raw import post, raw_client

URL = "http://localhost:4318/v1/traces"
TO = Tracing.to
SECRET = "blue whale"
ASKED = {
    "model": "tiny",
    "prompt": SECRET,
    "max_tokens": 6,
    "ignore_eos": True,
    "temperature": 0.5,
    "stop": ["zq#"],
}
logging.getLogger("lamina.requests").setLevel(logging.INFO)  # before any test has made a log
PHASES = ["receive", "queue", "prefill", "decode", "total"]


class Lines(logging.Handler):
    """Keeps the lines of the log of requests, parsed."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(json.loads(record.getMessage()))


class Watched:
    """A server whose lines are kept."""

    def __init__(self, server, lines):
        self.server, self.lines = server, lines

    def ask(self, path, body, **headers):
        """The answer to a request, and its line of log."""
        return self.of(lambda: self.server.client.post(path, json=body, headers=headers))

    def of(self, function):
        """What a function returns that makes one request, and its line of log."""
        self.lines.clear()
        answer = function()
        assert comes_true(lambda: self.lines)  # written once the answer is out
        return answer, self.lines[0]


@pytest.fixture(scope="module")
def start_watched(start_server):
    handler, logger = Lines(), logging.getLogger("lamina.requests")
    logger.addHandler(handler)
    yield lambda **config: Watched(start_server(**config), handler.lines)
    logger.removeHandler(handler)


@pytest.fixture(scope="module")
def watched(start_watched):
    return start_watched(log_requests=True)


def milliseconds(header):
    """The phases of a Server-Timing header."""
    return {name: float(spent) for name, spent in re.findall(r"(\w+);dur=([\d.]+)", header)}


@pytest.mark.parametrize(
    "path,body",
    [
        ("/v1/completions", ASKED),
        ("/v1/completions", ASKED | {"prompt": [[5, 6], [7], [8, 9]], "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
    ],
)
def test_a_whole_answer_has_its_phases_in_a_header(client, path, body):
    start = time.monotonic()
    answer = client.post(path, json=body).raise_for_status()
    spent = milliseconds(answer.headers["server-timing"])
    assert list(spent) == PHASES
    assert sum(spent[name] for name in PHASES[:-1]) <= spent["total"] + 1
    assert spent["total"] <= (time.monotonic() - start) * 1000


def test_what_asks_nothing_of_the_engine_has_no_phases(client):
    assert "server-timing" not in client.get("/v1/models").headers
    assert "server-timing" not in client.post("/v1/completions", json={"prompt": 5.5}).headers


def events(client, body):
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_has_its_phases_in_the_last_chunk_if_asked(client, usage):
    options = {"include_timing": True, "include_usage": usage}
    *chunks, last = events(client, ASKED | {"stream_options": options})
    assert last["choices"] == []
    assert list(last["timing"]) == PHASES
    assert all(spent >= 0 for spent in last["timing"].values())
    assert ("usage" in last) == usage
    assert not any("timing" in chunk for chunk in chunks)


def test_a_stream_that_did_not_ask_has_no_timing(client):
    assert not any(
        "timing" in chunk for chunk in events(client, ASKED | {"stream_options": {"include_usage": True}})
    )


def test_a_line_tells_who_asked_how_it_ended_and_what_it_took_without_text(watched):
    answer, line = watched.ask("/v1/completions", ASKED, **{"x-request-id": "own-7"})
    usage = answer.json()["usage"]
    assert line["id"] == "own-7"
    assert (line["method"], line["route"], line["status"], line["code"]) == (
        "POST",
        "/v1/completions",
        200,
        None,
    )
    assert (line["model"], line["ends"]) == ("tiny", ["length"])
    assert line["prompt_tokens"] == usage["prompt_tokens"]
    assert line["output_tokens"] == usage["completion_tokens"] == 6
    assert list(line["ms"]) == PHASES
    assert abs(line["time"] - time.time()) < 60
    assert line["params"] == {"max_tokens": 6, "temperature": 0.5, "stop": 1, "ignore_eos": True}
    assert SECRET not in json.dumps(line)
    assert "zq#" not in json.dumps(line)
    assert answer.json()["choices"][0]["text"] not in json.dumps(line, ensure_ascii=False)


def test_an_error_has_a_line_with_its_code_and_no_word_of_the_client(watched):
    path = "/v1/models/blue%20whale"
    _, line = watched.of(lambda: watched.server.client.get(path))
    assert line["route"].startswith("/v1/models/{")
    assert (line["status"], line["code"]) == (404, "model_not_found")
    assert "whale" not in json.dumps(line)
    assert "params" not in line


def test_a_client_that_leaves_has_a_line_with_what_was_generated(watched):
    body = ASKED | {"max_tokens": 200, "stream": True}

    def leave():
        with raw_client(watched.server.url) as client:
            client.send(post("/v1/completions", json.dumps(body).encode()))
            engine.begin(1)
            assert client.file.readline() == b"HTTP/1.1 200 OK\r\n"

    with watched.server.held() as engine:
        _, line = watched.of(leave)
    assert line["status"] == 200
    assert line["output_tokens"] == 1
    assert line["ends"] == ["abort"]
    assert line["prompt_tokens"] > 0


def test_probes_that_succeed_have_no_line(watched):
    def probe():
        for path in ("/metrics", "/health", "/health/live", "/health/ready"):
            watched.server.client.get(path).raise_for_status()
        return watched.server.client.get("/nowhere")

    _, line = watched.of(probe)
    assert (line["route"], line["status"]) == ("unmatched", 404)


def test_text_is_logged_where_that_is_wanted(start_watched):
    watched = start_watched(log_text=True)
    answer, line = watched.ask("/v1/completions", ASKED)
    assert line["prompts"] == [f"<s>{SECRET}"]
    assert line["answers"] == [answer.json()["choices"][0]["text"]]
    assert line["params"]["stop"] == ["zq#"]
    body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 3}
    answer, line = watched.ask("/v1/chat/completions", body)
    assert line["prompts"] == [f"<s>[user]{SECRET}</s>[assistant]"]
    assert line["answers"] == [answer.json()["choices"][0]["message"]["content"]]


def test_no_more_of_a_prompt_is_made_text_than_is_logged():
    lengths = []
    log = RequestLog(
        wants_params=False, wants_text=True, decode=lambda _, ids: lengths.append(len(ids)) or "a"
    )
    prompt = SimpleNamespace(prompt_token_ids=(5,) * 100_000, texts=["b"] * 2)
    record = SimpleNamespace(status=200, params=None, generations=[prompt], timing=dict)
    counts = (f"num_{which}_tokens" for which in ("prompt", "cached", "output"))
    names = ("code", "model", *counts, "ends", "engines")
    record.__dict__.update(dict.fromkeys(names))
    log.write({"method": "POST"}, "/v1/completions", record)
    log.close()
    assert lengths == [MOST_TEXT]


class Stuck(logging.Handler):
    """Takes no line until it is let go, as a pipe that nobody reads."""

    def __init__(self):
        super().__init__()
        self.is_inside, self.let_go, self.messages = threading.Event(), threading.Event(), []

    def emit(self, record):
        self.is_inside.set()
        assert self.let_go.wait(60)
        self.messages.append(record.getMessage())


@pytest.fixture
def stuck(monkeypatch):
    """The only handler of the lines of the log of requests."""
    handler = Stuck()
    monkeypatch.setattr(logging.getLogger("lamina.requests"), "handlers", [handler])
    yield handler
    handler.let_go.set()


def test_a_log_that_nobody_reads_holds_no_answer_up_and_tells_what_it_drops(
    start_server, stuck, monkeypatch, caplog
):
    monkeypatch.setattr(request_log, "MOST_WAITING", 3)
    server = start_server(access_log=True)
    server.client.get("/version").raise_for_status()
    assert stuck.is_inside.wait(60)
    for _ in range(10):
        server.client.get("/version").raise_for_status()
    assert comes_true(lambda: server.serving.request_log._num_dropped == 7)
    stuck.let_go.set()
    server.close()
    assert len(stuck.messages) == 1 + 3
    told = [each.getMessage() for each in caplog.records if "were dropped" in each.getMessage()]
    assert [message.split()[0] for message in told] == ["7"]


def test_a_log_that_is_never_read_again_does_not_keep_the_server_from_ending(
    start_server, stuck, monkeypatch, caplog
):
    monkeypatch.setattr(request_log, "SECONDS_TO_END", 0.05)
    server = start_server(access_log=True)
    for _ in range(4):
        server.client.get("/version").raise_for_status()
    assert stuck.is_inside.wait(60)
    assert server.close() == 0
    told = [each.getMessage() for each in caplog.records if "were dropped" in each.getMessage()]
    assert [message.split()[0] for message in told] == ["3"]
    stuck.let_go.set()
    server.serving.request_log._thread.join(60)
    assert len(stuck.messages) == 1


def test_a_line_that_cannot_be_made_is_told_of_and_the_next_one_comes(start_server, monkeypatch, caplog):
    handler, write, faults = Lines(), RequestLog._write, [ValueError("no line")]
    monkeypatch.setattr(logging.getLogger("lamina.requests"), "handlers", [handler])

    def failing_once(log, line):
        if faults:
            raise faults.pop()
        write(log, line)

    monkeypatch.setattr(RequestLog, "_write", failing_once)
    server = start_server(access_log=True)
    for path in ("/version", "/v1/models"):
        server.client.get(path).raise_for_status()
    server.close()
    assert [line["route"] for line in handler.lines] == ["/v1/models"]
    assert any("could not be logged" in each.getMessage() for each in caplog.records)


def test_lines_go_to_standard_output(capsys):
    logger = logging.getLogger("lamina.requests")
    before, logger.handlers = logger.handlers, []
    try:
        log = RequestLog.of(ServeConfig(model_names=("m",), access_log=True), lambda ids: "")
        log._logger.info("a line")
        assert capsys.readouterr().out == "a line\n"
    finally:
        logger.handlers = before


def test_lines_that_cannot_be_written_are_told_of_once_and_not_repeated(monkeypatch, caplog):
    lines = logging.getLogger("lamina.requests")
    monkeypatch.setattr(lines, "handlers", [])
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        log = RequestLog.of(ServeConfig(model_names=("m",), log_text=True), lambda ids: "")
        for _ in range(3):
            log._logger.info("a secret")
        lines.handlers[0].stream = io.StringIO()  # what it holds cannot be written at its end, either
        with contextlib.suppress(OSError):
            full.close()
    (said,) = [record.getMessage() for record in caplog.records if record.name == "lamina.serving"]
    assert "request log are lost" in said
    assert "No space left" in said


def test_there_is_no_log_unless_it_is_wanted():
    assert RequestLog.of(ServeConfig(model_names=("m",)), lambda ids: "") is None


class Traced:
    """A server whose spans are kept."""

    def __init__(self, server, exporter):
        self.server, self.exporter = server, exporter

    def ask(self, path, body, **headers):
        """The answer to a request, and its spans, the request's own last."""
        self.exporter.clear()
        answer = self.server.client.post(path, json=body, headers=headers)
        while not any(span.kind.name == "SERVER" for span in self.exporter.get_finished_spans()):
            time.sleep(0.001)
        return answer, self.exporter.get_finished_spans()


@pytest.fixture(scope="module")
def traced(start_server):
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tracing, "to", lambda endpoint: Tracing(provider))
        return Traced(start_server(otlp_traces_endpoint=URL), exporter)


def test_a_request_is_a_span_with_its_phases_below(traced):
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer, spans = traced.ask("/v1/completions", ASKED | {"seed": 5, "top_k": 3}, traceparent=parent)
    *phases, span = spans
    assert span.name == "text_completion tiny"
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert [phase.name for phase in phases] == PHASES[:-1]
    assert all(phase.parent.span_id == span.context.span_id for phase in phases)
    times = [moment for phase in phases for moment in (phase.start_time, phase.end_time)]
    assert times == sorted(times)
    assert span.start_time <= times[0] + 1_000_000
    assert times[-1] <= span.end_time + 1_000_000
    usage, attributes = answer.json()["usage"], dict(span.attributes)
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "tiny"
    assert attributes["gen_ai.request.max_tokens"] == 6
    assert attributes["gen_ai.request.seed"] == 5
    assert attributes["gen_ai.request.top_k"] == 3
    assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["http.response.status_code"] == 200
    assert "error.type" not in attributes
    assert SECRET not in span.to_json()


def test_a_refused_request_is_a_span_with_its_error(traced):
    _, (span,) = traced.ask("/v1/chat/completions", {"messages": [], "temperature": -1})
    assert span.name == "chat"
    assert span.attributes["http.response.status_code"] == 400
    assert span.attributes["error.type"]
    assert span.status.status_code.name == "UNSET"  # the client's fault


@pytest.mark.parametrize("header", ["", "00-0-0-0", "00-" + "f" * 5000, "\xff\xfe"])
def test_a_traceparent_that_is_none_begins_a_trace(traced, header):
    answer, spans = traced.ask("/v1/completions", ASKED, traceparent=header.encode("latin-1"))
    assert answer.status_code == 200
    assert spans[-1].parent is None


def test_traces_without_their_extra_name_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    with pytest.raises(UnsupportedError, match=r"lamina\[otel\]"):
        TO(URL)


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "", 5])
def test_an_endpoint_that_is_no_url_is_refused(endpoint):
    with pytest.raises(ConfigError, match="otlp_traces_endpoint"):
        ServeConfig(model_names=("m",), otlp_traces_endpoint=endpoint)
