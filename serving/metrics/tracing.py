"""OpenTelemetry traces: a span a request with its phases, in the words of the GenAI conventions."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from .record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.util.types import AttributeValue
    from starlette.types import Scope

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}
PARAMETERS = {  # of SamplingParams, and what the conventions call each after gen_ai.request.
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "n": "choice.count",
}


class Tracing:
    """Makes the spans of requests to the engine, once each is over; no text is in them."""

    def __init__(self, provider: "TracerProvider") -> None:
        """provider: of opentelemetry-sdk, which says where spans go and which are kept."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("lamina")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str) -> "Tracing":
        """Returns one that sends to an OTLP collector over HTTP, as http://localhost:4318/v1/traces.

        Raises UnsupportedError without lamina[otel].
        """
        from ...common.extras import require

        require("opentelemetry.sdk", extra="otel")
        require("opentelemetry.exporter.otlp.proto.http", extra="otel")
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create()  # with what OTEL_RESOURCE_ATTRIBUTES says
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "lamina"}))
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def trace(self, scope: "Scope", route: str, record: RequestRecord) -> None:
        """Makes the spans of a request; one that asked nothing of the engine has none."""
        operation = OPERATIONS.get(route)
        if operation is None:
            return
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        offset = time.time() - time.monotonic()
        span = self._tracer.start_span(
            f"{operation} {record.model}" if record.model else operation,
            self._propagator.extract(Headers(scope=scope)),
            SpanKind.SERVER,
            attributes=dict(_attributes(scope, route, operation, record)),
            start_time=_nanoseconds(record.started + offset),
        )
        if (record.status or 499) >= 500:
            span.set_status(StatusCode.ERROR)
        inside = set_span_in_context(span)
        for name, (start, end) in record.phases().items():
            phase = self._tracer.start_span(name, inside, start_time=_nanoseconds(start + offset))
            phase.end(_nanoseconds(end + offset))
        span.end(_nanoseconds(time.time()))

    def close(self) -> None:
        """Sends what has not been sent."""
        self._provider.shutdown()


def _attributes(
    scope: "Scope", route: str, operation: str, record: RequestRecord
) -> "Iterator[tuple[str, AttributeValue]]":
    status = record.status or 499
    yield "gen_ai.operation.name", operation
    yield "gen_ai.provider.name", "lamina"
    yield "http.request.method", scope["method"]
    yield "http.route", route
    yield "http.response.status_code", status
    if status >= 400:
        yield "error.type", record.code or str(status)
    if "lamina.request_id" in scope:
        yield "lamina.request_id", scope["lamina.request_id"]
    if record.params is None or record.model is None:
        return
    yield "gen_ai.request.model", record.model
    yield "gen_ai.response.model", record.model
    for name, attribute in PARAMETERS.items():
        if (value := getattr(record.params, name)) is not None:
            yield f"gen_ai.request.{attribute}", value
    yield "gen_ai.usage.input_tokens", record.num_prompt_tokens
    yield "gen_ai.usage.cache_read.input_tokens", record.num_cached_tokens
    yield "gen_ai.usage.output_tokens", record.num_output_tokens
    yield "gen_ai.response.finish_reasons", record.ends


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
