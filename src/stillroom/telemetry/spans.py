"""Traces for OpenTelemetry: a span for each HTTP request, and below it one for each phase of its answers.

The phases are known when an answer is complete, and become spans with their times then, so nothing is measured twice
and nothing is paid where no traces are asked for. The caller's `traceparent` (W3C) is the parent. Needs the extra
`otel`; without it nothing here is used.
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
"""In order; each begins where the one before it ends."""


class RequestSpan:
    """The span of the request under way."""

    def __init__(self, tracing: "Tracing", span: "Span") -> None:
        self._tracing = tracing
        self._span = span

    @property
    def trace_id(self) -> str:
        """As in `traceparent`."""
        return format(self._span.get_span_context().trace_id, "032x")

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, attributes: Mapping[str, Any]) -> None:
        self._span.set_attributes(attributes)

    def add_phases(self, began: float, seconds: Mapping[str, float], attributes: Mapping[str, Any]) -> None:
        """Spans of an answer's phases.

        Args:
            began: seconds since 1970.
            seconds: of some of `PHASES`.
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
    """The span of the request that this is done for; None where there are no traces."""
    return _CURRENT.get()


class Tracing:
    """Makes spans of requests. Thread-safe."""

    def __init__(self, provider: "TracerProvider") -> None:
        """The provider stays the caller's."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.tracer = provider.get_tracer("stillroom")
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def request(self, name: str, headers: Mapping[str, str]) -> Iterator[RequestSpan]:
        """A span for as long as the block lasts."""
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
    """Traces that go to a collector as long as the block lasts; none where the address is empty.

    Raises:
        ConfigError: the libraries are not there.
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
