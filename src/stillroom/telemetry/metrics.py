"""Every metric name of Stillroom, and the only place that may name one.

Callers hand over plain numbers, so that nothing here knows a request, an answer or a server. Names end in `_seconds`,
`_bytes`, `_ratio` or `_total`; a gauge that counts things has no unit. The table in docs/http.md is `reference()`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of `Metrics.render`: the Prometheus text format."""

_REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One row of the reference."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds in seconds, of histograms."""


SPECS = (
    MetricSpec("stillroom_requests_total", "counter", "Questions that ended, by outcome.", ("outcome",)),
    MetricSpec("stillroom_prompt_tokens_total", "counter", "Prompt tokens of all questions."),
    MetricSpec("stillroom_cached_tokens_total", "counter", "Prompt tokens whose KV came from a cache."),
    MetricSpec("stillroom_generated_tokens_total", "counter", "Tokens generated."),
    MetricSpec(
        "stillroom_retrieval_seconds",
        "histogram",
        "From a question's arrival to its documents.",
        buckets=_REQUEST_BUCKETS,
    ),
    MetricSpec(
        "stillroom_time_to_first_token_seconds",
        "histogram",
        "From a question's arrival to the first token, retrieval included.",
        buckets=_REQUEST_BUCKETS,
    ),
    MetricSpec(
        "stillroom_time_per_output_token_seconds",
        "histogram",
        "Mean time per token after the first, one observation per answer of two tokens or more.",
        buckets=_TOKEN_BUCKETS,
    ),
    MetricSpec(
        "stillroom_request_seconds",
        "histogram",
        "From a question's arrival to its last token.",
        buckets=_REQUEST_BUCKETS,
    ),
    MetricSpec("stillroom_kv_blocks", "gauge", "KV blocks, by state: free or used.", ("state",)),
    MetricSpec("stillroom_active_requests", "gauge", "Questions now, by state: waiting or running.", ("state",)),
    MetricSpec("stillroom_documents", "gauge", "Documents in the knowledge base."),
    MetricSpec("stillroom_chunks", "gauge", "Chunks in the knowledge base."),
    MetricSpec(
        "stillroom_http_requests_total", "counter", "HTTP requests, by route and status code.", ("path", "status")
    ),
)
_BY_NAME = {spec.name: spec for spec in SPECS}


class Metrics:
    """The metrics of one knowledge base and its engine. Thread-safe."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self._requests = self._counter("stillroom_requests_total")
        self._prompt_tokens = self._counter("stillroom_prompt_tokens_total")
        self._cached_tokens = self._counter("stillroom_cached_tokens_total")
        self._generated_tokens = self._counter("stillroom_generated_tokens_total")
        self._retrieval = self._histogram("stillroom_retrieval_seconds")
        self._ttft = self._histogram("stillroom_time_to_first_token_seconds")
        self._tpot = self._histogram("stillroom_time_per_output_token_seconds")
        self._total = self._histogram("stillroom_request_seconds")
        self._kv_blocks = self._gauge("stillroom_kv_blocks")
        self._active = self._gauge("stillroom_active_requests")
        self._documents = self._gauge("stillroom_documents")
        self._chunks = self._gauge("stillroom_chunks")
        self._http_requests = self._counter("stillroom_http_requests_total")

    def count_aborted(self) -> None:
        """Count a question that ended without an answer: cancelled, or given up by the engine."""
        self._requests.labels("aborted").inc()

    def observe_request(  # noqa: PLR0913  one call per answer beats eight that may be forgotten
        self,
        *,
        outcome: str,
        retrieval_seconds: float,
        ttft_seconds: float,
        tpot_seconds: float,
        total_seconds: float,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_generated_tokens: int,
    ) -> None:
        """Count a question that ended; `outcome` is its finish reason."""
        self._requests.labels(outcome).inc()
        self._prompt_tokens.inc(num_prompt_tokens)
        self._cached_tokens.inc(num_cached_tokens)
        self._generated_tokens.inc(num_generated_tokens)
        self._retrieval.observe(retrieval_seconds)
        self._total.observe(total_seconds)
        if num_generated_tokens > 0:
            self._ttft.observe(ttft_seconds)
        if num_generated_tokens > 1:  # a single token has no time between tokens
            self._tpot.observe(tpot_seconds)

    def set_kv_blocks(self, num_free: int, num_used: int) -> None:
        self._kv_blocks.labels("free").set(num_free)
        self._kv_blocks.labels("used").set(num_used)

    def set_requests(self, num_waiting: int, num_running: int) -> None:
        self._active.labels("waiting").set(num_waiting)
        self._active.labels("running").set(num_running)

    def set_corpus(self, num_documents: int, num_chunks: int) -> None:
        self._documents.set(num_documents)
        self._chunks.set(num_chunks)

    def count_http_request(self, path: str, status: int) -> None:
        """Count a served HTTP request; `path` is the route's template, so that there are few of them."""
        self._http_requests.labels(path, str(status)).inc()

    def render(self) -> bytes:
        """Everything, in the Prometheus text format."""
        return generate_latest(_WithoutCreated(self.registry))

    def _counter(self, name: str) -> Counter:
        spec = _BY_NAME[name]
        return Counter(name, spec.help, spec.labels, registry=self.registry)

    def _gauge(self, name: str) -> Gauge:
        spec = _BY_NAME[name]
        return Gauge(name, spec.help, spec.labels, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        spec = _BY_NAME[name]
        return Histogram(name, spec.help, spec.labels, registry=self.registry, buckets=spec.buckets)


class _WithoutCreated:
    """A registry less the `_created` samples, which the library adds to every counter and histogram.

    They would be metrics of ours whose names have no unit; the library's own switch for them is global to the process.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


def reference() -> str:
    """All metrics as a Markdown table."""
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for spec in SPECS:
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        rows.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.help} |")
    return "\n".join(rows) + "\n"
