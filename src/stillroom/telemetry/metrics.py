"""Counts events, reads the counts of other parts, and renders both in the Prometheus text format."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stillroom.errors import StillroomError
from stillroom.telemetry import catalogue
from stillroom.telemetry.catalogue import MetricSpec, Readings

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of the Prometheus text format."""

_INTERNAL_ERROR = "500"


Corpora = Callable[[], Mapping[str, tuple[int, int]]]
"""Returns the number of documents and chunks, by folder of a knowledge base."""


class Metrics:
    """The metrics of one knowledge base and its engine. Thread-safe."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self._requests = self._counter(catalogue.REQUESTS)
        self._prompt_tokens = self._counter(catalogue.PROMPT_TOKENS)
        self._cached_tokens = self._counter(catalogue.CACHED_TOKENS)
        self._generated_tokens = self._counter(catalogue.GENERATED_TOKENS)
        self._retrieval = self._histogram(catalogue.RETRIEVAL)
        self._ttft = self._histogram(catalogue.TTFT)
        self._tpot = self._histogram(catalogue.TPOT)
        self._total = self._histogram(catalogue.REQUEST_SECONDS)
        self._phases = self._histogram(catalogue.PHASES)
        self._speculations = self._counter(catalogue.SPECULATIONS)
        self._ahead = self._counter(catalogue.SPECULATION_AHEAD)
        self._hops = self._counter(catalogue.HOPS)
        self._kv_blocks = self._gauge(catalogue.KV_BLOCKS)
        self._active = self._gauge(catalogue.ACTIVE_REQUESTS)
        self._corpora: dict[str, Corpora] = {}
        self.watch(self._corpus_readings)
        self._refused = self._counter(catalogue.REFUSED_REQUESTS)
        self._http_requests = self._counter(catalogue.HTTP_REQUESTS)

    def observe_answer(
        self,
        outcome: str,
        *,
        num_generated_tokens: int = 0,
        tpot_seconds: float = 0.0,
        total_seconds: float | None = None,
    ) -> None:
        """Count an answer that ended.

        Args:
            outcome: `stop`, `length`, `aborted` or `failed`.
            total_seconds: from the question's arrival; None if the answer is not complete.
        """
        self._requests.labels(outcome).inc()
        self._generated_tokens.inc(num_generated_tokens)
        if num_generated_tokens > 1:  # a single token has no time between tokens
            self._tpot.observe(tpot_seconds)
        if total_seconds is not None:
            self._total.observe(total_seconds)

    def observe_retrieval(self, seconds: float) -> None:
        """Record the seconds from an answered question's arrival to its documents; other searches do not count."""
        self._retrieval.observe(seconds)

    def observe_prompt(
        self,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        ttft_seconds: float | None,
        phase_seconds: Mapping[str, float | None],
    ) -> None:
        """Count a prefilled prompt, once for all its answers. A time that was not measured is None."""
        self._prompt_tokens.inc(num_prompt_tokens)
        self._cached_tokens.inc(num_cached_tokens)
        if ttft_seconds is not None:
            self._ttft.observe(ttft_seconds)
        for phase, seconds in phase_seconds.items():
            if seconds is not None:
                self._phases.labels(phase).observe(seconds)

    def count_speculation(self, outcome: str, ahead_seconds: float) -> None:
        self._speculations.labels(outcome).inc()
        self._ahead.inc(ahead_seconds)

    def count_hop(self, end: str | None, *, num_prompt_tokens: int, num_cached_tokens: int, num_generated: int) -> None:
        """Count a search of a question with several hops, and the tokens of its own request.

        Args:
            end: why no other search followed; None if one did.
        """
        self._hops.labels(end or "another").inc()
        self._prompt_tokens.inc(num_prompt_tokens)
        self._cached_tokens.inc(num_cached_tokens)
        self._generated_tokens.inc(num_generated)

    def set_kv_blocks(self, num_free: int, num_used: int) -> None:
        self._kv_blocks.labels("free").set(num_free)
        self._kv_blocks.labels("used").set(num_used)

    def set_requests(self, num_waiting: int, num_running: int) -> None:
        self._active.labels("waiting").set(num_waiting)
        self._active.labels("running").set(num_running)

    def count_refused(self, reason: str) -> None:
        """Count a refused request: `rate`, `concurrency`, `queue` or `closing`."""
        self._refused.labels(reason).inc()

    def count_http_request(self, path: str, status: int) -> None:
        """Count a served HTTP request; `path` is the route's template, which bounds the number of series."""
        self._http_requests.labels(path, str(status)).inc()

    def expect_http_requests(self, paths: Iterable[str]) -> None:
        """Show internal errors of these routes as 0 before the first one; see `MetricSpec.from_zero`."""
        for path in paths:
            self._http_requests.labels(path, _INTERNAL_ERROR)

    def watch(self, readings: Callable[[], Readings]) -> None:
        """Call `readings` at each `render`, and show what it returns."""
        self.registry.register(_OnRender(readings))

    def watch_corpora(self, source: str, corpora: Corpora) -> None:
        """Call `corpora` at each `render`. A knowledge base that several sources report counts once."""
        self._corpora[source] = corpora

    def forget_corpora(self, source: str) -> None:
        """Stop asking this source."""
        self._corpora.pop(source, None)

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(_WithoutCreated(self.registry))

    def _corpus_readings(self) -> Readings:
        found: dict[str, tuple[int, int]] = {}
        for corpora in list(self._corpora.values()):
            with suppress(StillroomError):  # one unreadable knowledge base must not hide the others
                found |= corpora()
        return {
            catalogue.DOCUMENTS: sum(num_documents for num_documents, _ in found.values()),
            catalogue.CHUNKS: sum(num_chunks for _, num_chunks in found.values()),
        }

    def _counter(self, spec: MetricSpec) -> Counter:
        counter = Counter(spec.name, spec.help, spec.labels, registry=self.registry)
        for label in spec.from_zero:
            counter.labels(label)
        return counter

    def _gauge(self, spec: MetricSpec) -> Gauge:
        return Gauge(spec.name, spec.help, spec.labels, registry=self.registry)

    def _histogram(self, spec: MetricSpec) -> Histogram:
        return Histogram(spec.name, spec.help, spec.labels, registry=self.registry, buckets=spec.buckets)


class _OnRender(Collector):
    """Metrics whose values are read when they are rendered."""

    def __init__(self, readings: Callable[[], Readings]) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        for spec, values in self._readings().items():
            kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
            family = kind(spec.name.removesuffix("_total"), spec.help, labels=spec.labels)
            for labels, value in values.items() if isinstance(values, Mapping) else [((), values)]:
                family.add_metric((labels,) if isinstance(labels, str) else labels, value)
            yield family


class _WithoutCreated:
    """A registry without the `_created` samples that the library adds to every counter and histogram.

    Their names have no unit, and the library's own switch for them is global to the process.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
