"""Every metric name of Stillroom, and the only place that may name one.

Callers hand over plain numbers, so that nothing here knows a request, an answer or a server. Names end in `_seconds`,
`_bytes`, `_ratio` or `_total`; a gauge that counts things has no unit. The table in docs/metrics.md is `reference()`.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from stillroom.errors import StillroomError
from stillroom.telemetry.exposition import MetricSpec, Series, Watched, WithoutCreated
from stillroom.telemetry.figures import CacheFigures, EngineFigures, IndexFigures

_REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


SPECS = (
    MetricSpec(
        "stillroom_requests_total",
        "counter",
        "Answers that ended, by outcome: stop, length, aborted or failed. A question with n = 4 has four.",
        ("outcome",),
    ),
    MetricSpec("stillroom_prompt_tokens_total", "counter", "Tokens of the prompts that were read."),
    MetricSpec("stillroom_cached_tokens_total", "counter", "Prompt tokens whose KV came from a cache."),
    MetricSpec("stillroom_generated_tokens_total", "counter", "Tokens generated, also those of answers that were cut."),
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
        "From a question's arrival to the last token of an answer, of complete answers.",
        buckets=_REQUEST_BUCKETS,
    ),
    MetricSpec(
        "stillroom_phase_seconds",
        "histogram",
        "Of questions: queue, from the search to the engine's turn; load, of kept KV; prefill, to the first token.",
        ("phase",),
        buckets=_REQUEST_BUCKETS,
    ),
    MetricSpec(
        "stillroom_speculations_total",
        "counter",
        "Questions, by what became of beginning to read before the search had ended.",
        ("outcome",),
    ),
    MetricSpec(
        "stillroom_speculation_ahead_seconds_total",
        "counter",
        "How long the model had worked on the right prompts when their searches ended.",
    ),
    MetricSpec("stillroom_kv_cache_nodes", "gauge", "Pieces of prompts whose KV is kept, by tier.", ("tier",)),
    MetricSpec("stillroom_kv_cache_bytes", "gauge", "KV kept, by tier.", ("tier",)),
    MetricSpec("stillroom_kv_cache_hits_total", "counter", "Pieces of prompts whose KV was there, by tier.", ("tier",)),
    MetricSpec(
        "stillroom_kv_cache_hit_tokens_total", "counter", "Prompt tokens whose KV was there, by tier.", ("tier",)
    ),
    MetricSpec("stillroom_kv_cache_misses_total", "counter", "Pieces of prompts that had to be computed."),
    MetricSpec("stillroom_kv_cache_missed_tokens_total", "counter", "Tokens of those pieces."),
    MetricSpec(
        "stillroom_kv_cache_recomputed_total",
        "counter",
        "Misses whose KV was there, but slower to load than to compute.",
    ),
    MetricSpec(
        "stillroom_kv_cache_placed_total",
        "counter",
        "Documents used at another place than their own, by tier.",
        ("tier",),
    ),
    MetricSpec("stillroom_kv_cache_placed_tokens_total", "counter", "Tokens of those documents."),
    MetricSpec("stillroom_kv_cache_repaired_tokens_total", "counter", "Of these: computed again."),
    MetricSpec(
        "stillroom_kv_cache_placed_overlap_total",
        "counter",
        "beta' of placed documents, added up: 1 is the same context.",
    ),
    MetricSpec("stillroom_kv_cache_placed_overhead_total", "counter", "CFO of placed documents, added up."),
    MetricSpec("stillroom_kv_cache_unfocused_total", "counter", "Placed documents that the question did not look at."),
    MetricSpec(
        "stillroom_audits_total", "counter", "Answers from placed documents compared with a full prefill.", ("result",)
    ),
    MetricSpec(
        "stillroom_audit_disagreement_bound_ratio",
        "gauge",
        "Of such answers, the share that differs is below this with 95 % confidence.",
    ),
    MetricSpec(
        "stillroom_recompute_ratio",
        "gauge",
        "Share of placed tokens to be computed again, or alpha of it; 1: nothing is placed.",
    ),
    MetricSpec("stillroom_kv_cache_evictions_total", "counter", "Copies dropped to make room, by tier.", ("tier",)),
    MetricSpec("stillroom_kv_cache_failed_loads_total", "counter", "Copies that were damaged or gone.", ("tier",)),
    MetricSpec(
        "stillroom_kv_cache_verify_failures_total",
        "counter",
        "Copies of KV that did not verify, by tier and reason; on the device: KV that was not finite.",
        ("tier", "reason"),
    ),
    MetricSpec("stillroom_kv_cache_write_failures_total", "counter", "Records that the disk did not take."),
    MetricSpec(
        "stillroom_kv_cache_rejected_total", "counter", "Copies not written to a disk full of what is used more often."
    ),
    MetricSpec("stillroom_kv_cache_moves_total", "counter", "Copies made between tiers.", ("source", "target")),
    MetricSpec("stillroom_kv_cache_moved_bytes_total", "counter", "Bytes of those copies.", ("source", "target")),
    MetricSpec("stillroom_kv_cache_move_seconds_total", "counter", "Time they took.", ("source", "target")),
    MetricSpec(
        "stillroom_kv_cache_read_ahead_bytes_total",
        "counter",
        "Read from disk for questions that waited: used or wasted.",
        ("outcome",),
    ),
    MetricSpec("stillroom_kv_blocks", "gauge", "KV blocks, by state: free or used.", ("state",)),
    MetricSpec("stillroom_active_requests", "gauge", "Questions now, by state: waiting or running.", ("state",)),
    MetricSpec("stillroom_device_losses_total", "counter", "Times that the model's device was lost."),
    MetricSpec(
        "stillroom_failed_steps_total", "counter", "Steps of the engine that failed for another reason than the device."
    ),
    MetricSpec(
        "stillroom_index_lists",
        "gauge",
        "Lists of a tiered index, by where they are: device, ram or disk.",
        ("tier",),
    ),
    MetricSpec("stillroom_index_list_bytes", "gauge", "Codes and ids of those lists.", ("tier",)),
    MetricSpec(
        "stillroom_index_probes_total", "counter", "Lists that searches looked at, by where they were.", ("tier",)
    ),
    MetricSpec(
        "stillroom_index_hit_ratio", "gauge", "Share of them that were in RAM, over the last window of searches."
    ),
    MetricSpec("stillroom_index_exchanged_total", "counter", "Lists that came into RAM in place of colder ones."),
    MetricSpec("stillroom_documents", "gauge", "Documents in the knowledge bases of all tenants."),
    MetricSpec("stillroom_chunks", "gauge", "Chunks in the knowledge bases of all tenants."),
    MetricSpec(
        "stillroom_refused_requests_total",
        "counter",
        "HTTP requests not taken on: rate, concurrency, queue or closing.",
        ("reason",),
    ),
    MetricSpec(
        "stillroom_http_requests_total", "counter", "HTTP requests, by route and status code.", ("path", "status")
    ),
)
_BY_NAME = {spec.name: spec for spec in SPECS}

_FROM_ZERO = {
    "stillroom_requests_total": ("stop", "length", "aborted", "failed"),
    "stillroom_refused_requests_total": ("rate", "concurrency", "queue", "closing"),
}
"""Labels that are there from the start. `rate` and `increase` see nothing of a series' first value, so one that began
with a burst would hide it."""
_INTERNAL_ERROR = "500"


Corpora = Callable[[], Mapping[str, tuple[int, int]]]
"""Tells how many documents and chunks there are, by folder of a knowledge base."""


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
        self._phases = self._histogram("stillroom_phase_seconds")
        self._speculations = self._counter("stillroom_speculations_total")
        self._ahead = self._counter("stillroom_speculation_ahead_seconds_total")
        self._kv_blocks = self._gauge("stillroom_kv_blocks")
        self._active = self._gauge("stillroom_active_requests")
        self._corpora: dict[str, Corpora] = {}
        self._watch(self._corpus_series)
        self._refused = self._counter("stillroom_refused_requests_total")
        self._http_requests = self._counter("stillroom_http_requests_total")

    def observe_answer(
        self,
        outcome: str,
        *,
        num_generated_tokens: int = 0,
        tpot_seconds: float = 0.0,
        total_seconds: float | None = None,
    ) -> None:
        """Count an answer that ended, however it did.

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

    def observe_search(self, seconds: float) -> None:
        """A question's documents were found, so long after its arrival."""
        self._retrieval.observe(seconds)

    def observe_prompt(
        self,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        ttft_seconds: float | None,
        phase_seconds: Mapping[str, float | None],
    ) -> None:
        """Count a prompt that was read, once for all its answers. Times of which nothing is known are None."""
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

    def set_kv_blocks(self, num_free: int, num_used: int) -> None:
        self._kv_blocks.labels("free").set(num_free)
        self._kv_blocks.labels("used").set(num_used)

    def set_requests(self, num_waiting: int, num_running: int) -> None:
        self._active.labels("waiting").set(num_waiting)
        self._active.labels("running").set(num_running)

    def count_refused(self, reason: str) -> None:
        """Count a request that was not taken on: `rate`, `concurrency`, `queue` or `closing`."""
        self._refused.labels(reason).inc()

    def count_http_request(self, path: str, status: int) -> None:
        """Count a served HTTP request; `path` is the route's template, so that there are few of them."""
        self._http_requests.labels(path, str(status)).inc()

    def expect_http_requests(self, paths: Iterable[str]) -> None:
        """Internal errors of these routes are counted from zero, so that a first burst shows as an increase."""
        for path in paths:
            self._http_requests.labels(path, _INTERNAL_ERROR)

    def watch_corpora(self, source: str, corpora: Corpora) -> None:
        """Ask this source for knowledge bases whenever somebody looks. One that several sources tell of counts once."""
        self._corpora[source] = corpora

    def forget_corpora(self, source: str) -> None:
        """Do not ask this source any more."""
        self._corpora.pop(source, None)

    def watch_cache(self, figures: Callable[[], CacheFigures | None]) -> None:
        """Ask for these whenever somebody looks."""
        self._watch(lambda: _cache_series(figures()))

    def watch_engine(self, figures: Callable[[], EngineFigures | None]) -> None:
        """Ask for these whenever somebody looks."""
        self._watch(lambda: _engine_series(figures()))

    def watch_index(self, figures: Callable[[], IndexFigures | None]) -> None:
        """Ask for these whenever somebody looks."""
        self._watch(lambda: _index_series(figures()))

    def render(self) -> bytes:
        """Everything, in the Prometheus text format."""
        return generate_latest(WithoutCreated(self.registry))

    def _watch(self, series: Callable[[], Mapping[str, Series]]) -> None:
        self.registry.register(Watched(lambda: ((_BY_NAME[name], values) for name, values in series().items())))

    def _corpus_series(self) -> Mapping[str, Series]:
        found: dict[str, tuple[int, int]] = {}
        for corpora in list(self._corpora.values()):
            with suppress(StillroomError):  # one that cannot be read must not hide the rest
                found |= corpora()
        return {
            "stillroom_documents": {(): sum(num_documents for num_documents, _ in found.values())},
            "stillroom_chunks": {(): sum(num_chunks for _, num_chunks in found.values())},
        }

    def _counter(self, name: str) -> Counter:
        spec = _BY_NAME[name]
        counter = Counter(name, spec.help, spec.labels, registry=self.registry)
        for label in _FROM_ZERO.get(name, ()):
            counter.labels(label)
        return counter

    def _gauge(self, name: str) -> Gauge:
        spec = _BY_NAME[name]
        return Gauge(name, spec.help, spec.labels, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        spec = _BY_NAME[name]
        return Histogram(name, spec.help, spec.labels, registry=self.registry, buckets=spec.buckets)


def _cache_series(figures: CacheFigures | None) -> Mapping[str, Series]:
    if figures is None:
        return {}
    found: dict[str, Series] = {
        "stillroom_kv_cache_nodes": figures.num_nodes,
        "stillroom_kv_cache_bytes": figures.num_bytes,
        "stillroom_kv_cache_hits_total": figures.hits,
        "stillroom_kv_cache_hit_tokens_total": figures.hit_tokens,
        "stillroom_kv_cache_misses_total": {(): figures.misses},
        "stillroom_kv_cache_missed_tokens_total": {(): figures.missed_tokens},
        "stillroom_kv_cache_recomputed_total": {(): figures.cheaper},
        "stillroom_kv_cache_placed_total": figures.placed,
        "stillroom_kv_cache_placed_tokens_total": {(): figures.placed_tokens},
        "stillroom_kv_cache_repaired_tokens_total": {(): figures.repaired_tokens},
        "stillroom_kv_cache_placed_overlap_total": {(): figures.placed_overlap},
        "stillroom_kv_cache_placed_overhead_total": {(): figures.placed_overhead},
        "stillroom_kv_cache_unfocused_total": {(): figures.unfocused},
        "stillroom_kv_cache_evictions_total": figures.evictions,
        "stillroom_kv_cache_failed_loads_total": figures.failed_loads,
        "stillroom_kv_cache_verify_failures_total": figures.verify_failures,
        "stillroom_kv_cache_write_failures_total": {(): figures.write_failures},
        "stillroom_kv_cache_rejected_total": {(): figures.rejected},
        "stillroom_kv_cache_moves_total": figures.moves,
        "stillroom_kv_cache_moved_bytes_total": figures.moved_bytes,
        "stillroom_kv_cache_move_seconds_total": figures.moved_seconds,
        "stillroom_kv_cache_read_ahead_bytes_total": figures.read_ahead_bytes,
    }
    audit = figures.audit
    if audit is not None:
        found["stillroom_audits_total"] = audit.results
        found["stillroom_audit_disagreement_bound_ratio"] = {(): audit.disagreement_bound}
        found["stillroom_recompute_ratio"] = {(): audit.recompute_ratio}
    return found


def _engine_series(figures: EngineFigures | None) -> Mapping[str, Series]:
    if figures is None:
        return {}
    return {
        "stillroom_device_losses_total": {(): figures.device_losses},
        "stillroom_failed_steps_total": {(): figures.failed_steps},
    }


def _index_series(figures: IndexFigures | None) -> Mapping[str, Series]:
    if figures is None:
        return {}
    return {
        "stillroom_index_lists": figures.num_lists,
        "stillroom_index_list_bytes": figures.num_bytes,
        "stillroom_index_probes_total": figures.probes,
        "stillroom_index_hit_ratio": {(): figures.hit_ratio},
        "stillroom_index_exchanged_total": {(): figures.exchanged},
    }


def reference() -> str:
    """All metrics as a Markdown table."""
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for spec in SPECS:
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        rows.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.help} |")
    return "\n".join(rows) + "\n"
