"""OpenTelemetry traces: a span for each HTTP request, with a child span for each phase of its answers.

Spans of phases are made from the measured times when an answer is complete, so nothing is measured twice. The client's
`traceparent` (W3C) is the parent. Needs the extra `otel`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from stillroom.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

PHASES = ("retrieval", "queue", "load", "prefill", "decode")
"""In order; each begins where the previous one ends."""


class RequestSpan:
    """The span of the current request."""

    def __init__(self, tracing: "Tracing", span: "Span") -> None:
        self._tracing = tracing
        self._span = span

    @property
    def trace_id(self) -> str:
        """Trace id as in `traceparent`."""
        return format(self._span.get_span_context().trace_id, "032x")

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, attributes: Mapping[str, Any]) -> None:
        self._span.set_attributes(attributes)

    def add_phases(self, began: float, seconds: Mapping[str, float], attributes: Mapping[str, Any]) -> None:
        """Add spans of an answer's phases.

        Args:
            began: start of the first phase, in seconds since 1970.
            seconds: durations, by phase; phases may be missing.
        """
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(self._span)
        at = began
        for name in PHASES:
            if name in seconds:
                span = self._tracing.tracer.start_span(
                    name, context, start_time=_nanoseconds(at), attributes=dict(attributes)
                )
                at += seconds[name]
                span.end(_nanoseconds(at))


_CURRENT: ContextVar[RequestSpan | None] = ContextVar("stillroom_request_span", default=None)


def current_span() -> RequestSpan | None:
    """Return the span of the current request; None without traces."""
    return _CURRENT.get()


class Tracing:
    """Makes spans of requests. Thread-safe."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.tracer = provider.get_tracer("stillroom")
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def request(self, name: str, headers: Mapping[str, str]) -> Iterator[RequestSpan]:
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract(headers)
        span = self.tracer.start_span(name, context, kind=SpanKind.SERVER)
        found = RequestSpan(self, span)
        token = _CURRENT.set(found)
        try:
            yield found
        finally:
            _CURRENT.reset(token)
            span.end()


@contextmanager
def exporting(endpoint: str) -> Iterator[Tracing | None]:
    """Export traces to a collector during the block; None if `endpoint` is empty.

    Raises:
        ConfigError: the extra `otel` is not installed.
    """
    if not endpoint:
        yield None
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError("server.otlp_endpoint needs more libraries: pip install 'stillroom[otel]'") from error
    address = endpoint if endpoint.rstrip("/").endswith("/v1/traces") else f"{endpoint.rstrip('/')}/v1/traces"
    provider = TracerProvider(resource=Resource.create({"service.name": "stillroom"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=address)))
    try:
        yield Tracing(provider)
    finally:
        provider.shutdown()


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
