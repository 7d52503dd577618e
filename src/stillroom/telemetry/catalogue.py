"""Every metric of Stillroom, declared once: name, kind, labels and meaning.

To add one: declare it here, then either count it in `metrics.Metrics`, or add it to the `Readings` of a part that keeps
its own counts (`KVCache.readings`, `LocalBackend.readings`, `ListFigures.readings`). `/metrics` shows it and
docs/metrics.md lists it from this declaration (`python docs/_site/metrics.py`).

Names end in `_seconds`, `_bytes`, `_ratio` or `_total`; a gauge that counts things has no unit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """Declares one metric."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, in seconds."""
    from_zero: tuple[str, ...] = ()
    """Values of the label that are shown as 0 before the first event. `rate` and `increase` ignore a series' first
    value, so an alert would miss a series that began with a burst."""


Readings = Mapping[MetricSpec, float | Mapping[Any, float]]
"""Values of metrics at one moment; of a metric with labels, by label or by tuple of labels."""

_TIER = ("tier",)
_BETWEEN_TIERS = ("source", "target")
_REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)

# Answers

REQUESTS = MetricSpec(
    "stillroom_requests_total",
    "counter",
    "Answers that ended, by outcome: stop, length, aborted or failed. A question with n = 4 counts four.",
    ("outcome",),
    from_zero=("stop", "length", "aborted", "failed"),
)
PROMPT_TOKENS = MetricSpec("stillroom_prompt_tokens_total", "counter", "Tokens of the prompts that were prefilled.")
CACHED_TOKENS = MetricSpec("stillroom_cached_tokens_total", "counter", "Prompt tokens whose KV came from a cache.")
GENERATED_TOKENS = MetricSpec(
    "stillroom_generated_tokens_total", "counter", "Tokens generated, including tokens of incomplete answers."
)
RETRIEVAL = MetricSpec(
    "stillroom_retrieval_seconds",
    "histogram",
    "From a question's arrival to its documents.",
    buckets=_REQUEST_BUCKETS,
)
TTFT = MetricSpec(
    "stillroom_time_to_first_token_seconds",
    "histogram",
    "From a question's arrival to the first token, retrieval included.",
    buckets=_REQUEST_BUCKETS,
)
TPOT = MetricSpec(
    "stillroom_time_per_output_token_seconds",
    "histogram",
    "Mean time per token after the first, one observation per answer of two tokens or more.",
    buckets=_TOKEN_BUCKETS,
)
REQUEST_SECONDS = MetricSpec(
    "stillroom_request_seconds",
    "histogram",
    "From a question's arrival to the last token of a complete answer.",
    buckets=_REQUEST_BUCKETS,
)
PHASES = MetricSpec(
    "stillroom_phase_seconds",
    "histogram",
    "Phases of a question: queue, from the search to admission; load, of kept KV; prefill, to the first token.",
    ("phase",),
    buckets=_REQUEST_BUCKETS,
)
SPECULATIONS = MetricSpec(
    "stillroom_speculations_total",
    "counter",
    "Questions, by the outcome of the prefill that began before the search ended.",
    ("outcome",),
)
SPECULATION_AHEAD = MetricSpec(
    "stillroom_speculation_ahead_seconds_total",
    "counter",
    "Prefill time spent on the right prompts before their searches ended.",
)

HOPS = MetricSpec(
    "stillroom_hops_total",
    "counter",
    "Searches of questions with several hops, by what followed: another, or why none did (docs/hops.md).",
    ("end",),
)

# KV cache

KV_NODES = MetricSpec("stillroom_kv_cache_nodes", "gauge", "Pieces of prompts whose KV is kept, by tier.", _TIER)
KV_BYTES = MetricSpec("stillroom_kv_cache_bytes", "gauge", "KV kept, by tier.", _TIER)
KV_HITS = MetricSpec(
    "stillroom_kv_cache_hits_total", "counter", "Pieces of prompts whose KV was reused, by tier.", _TIER
)
KV_HIT_TOKENS = MetricSpec(
    "stillroom_kv_cache_hit_tokens_total", "counter", "Prompt tokens whose KV was reused, by tier.", _TIER
)
KV_MISSES = MetricSpec("stillroom_kv_cache_misses_total", "counter", "Pieces of prompts that were computed.")
KV_MISSED_TOKENS = MetricSpec("stillroom_kv_cache_missed_tokens_total", "counter", "Tokens of those pieces.")
KV_RECOMPUTED = MetricSpec(
    "stillroom_kv_cache_recomputed_total",
    "counter",
    "Misses whose KV was kept, but slower to load than to compute.",
)
KV_PLACED = MetricSpec(
    "stillroom_kv_cache_placed_total",
    "counter",
    "Documents reused at another position than their own, by tier.",
    _TIER,
)
KV_PLACED_TOKENS = MetricSpec("stillroom_kv_cache_placed_tokens_total", "counter", "Tokens of those documents.")
KV_PREPARED_TOKENS = MetricSpec(
    "stillroom_kv_cache_prepared_tokens_total",
    "counter",
    "Tokens of documents reused as prepared in their document's context.",
)
PREPARED = MetricSpec("stillroom_prepared_chunks_total", "counter", "Chunks computed before a question asked for them.")
KV_IN_DOCUMENT = MetricSpec(
    "stillroom_kv_cache_prepared_chunks", "gauge", "Chunks kept in their document's context, by tier.", _TIER
)
KV_IN_DOCUMENT_BYTES = MetricSpec(
    "stillroom_kv_cache_prepared_bytes", "gauge", "Bytes of those chunks, by tier.", _TIER
)
KV_UNUSED_BYTES = MetricSpec(
    "stillroom_kv_cache_unused_bytes", "gauge", "Bytes of prepared KV that no question has used yet, by tier.", _TIER
)
KV_REPAIRED_TOKENS = MetricSpec(
    "stillroom_kv_cache_repaired_tokens_total", "counter", "Tokens of those documents that were recomputed."
)
KV_PLACED_OVERLAP = MetricSpec(
    "stillroom_kv_cache_placed_overlap_total",
    "counter",
    "Sum of beta' over placed documents: 1 is the same context.",
)
KV_PLACED_OVERHEAD = MetricSpec(
    "stillroom_kv_cache_placed_overhead_total", "counter", "Sum of CFO over placed documents."
)
KV_UNFOCUSED = MetricSpec(
    "stillroom_kv_cache_unfocused_total", "counter", "Placed documents that the question did not attend to."
)
AUDITS = MetricSpec(
    "stillroom_audits_total", "counter", "Answers from placed documents compared with full prefills.", ("result",)
)
AUDIT_REFERENCES = MetricSpec(
    "stillroom_audit_agreements_total",
    "counter",
    "Audited answers that agree with a full prefill of their prompt, or of their documents (prepared documents only).",
    ("reference",),
)
AUDITS_WITHOUT_DOCUMENTS = MetricSpec(
    "stillroom_audits_without_documents_total",
    "counter",
    "Audited answers whose documents were too long together, or changed meanwhile, for a full prefill.",
)
AUDIT_BOUND = MetricSpec(
    "stillroom_audit_disagreement_bound_ratio",
    "gauge",
    "Upper bound, with 95 % confidence, on the share of such answers that agree with no full prefill.",
)
PLACING_SUSPENDED = MetricSpec(
    "stillroom_placing_suspended",
    "gauge",
    "Whether too many audited answers differed, so that answers use exact prefixes only; 1: yes.",
)
RECOMPUTE_RATIO = MetricSpec(
    "stillroom_recompute_ratio",
    "gauge",
    "Share of placed tokens to be recomputed, or alpha; 1: nothing is placed.",
)
KV_EVICTIONS = MetricSpec("stillroom_kv_cache_evictions_total", "counter", "Copies evicted, by tier.", _TIER)
KV_FAILED_LOADS = MetricSpec(
    "stillroom_kv_cache_failed_loads_total", "counter", "Copies that were damaged or missing.", _TIER
)
KV_VERIFY_FAILURES = MetricSpec(
    "stillroom_kv_cache_verify_failures_total",
    "counter",
    "Copies of KV that failed verification, by tier and reason; on the device: KV that was not finite.",
    ("tier", "reason"),
)
KV_WRITE_FAILURES = MetricSpec(
    "stillroom_kv_cache_write_failures_total", "counter", "Records that could not be written to disk."
)
KV_REJECTED = MetricSpec(
    "stillroom_kv_cache_rejected_total",
    "counter",
    "Copies not written because a full disk holds KV that is used more often.",
)
KV_MOVES = MetricSpec("stillroom_kv_cache_moves_total", "counter", "Copies made between tiers.", _BETWEEN_TIERS)
KV_MOVED_BYTES = MetricSpec("stillroom_kv_cache_moved_bytes_total", "counter", "Bytes of those copies.", _BETWEEN_TIERS)
KV_MOVE_SECONDS = MetricSpec(
    "stillroom_kv_cache_move_seconds_total", "counter", "Duration of those copies.", _BETWEEN_TIERS
)
KV_PREFETCHED_BYTES = MetricSpec(
    "stillroom_kv_cache_read_ahead_bytes_total",
    "counter",
    "Bytes prefetched from disk for waiting questions: used or wasted.",
    ("outcome",),
)
TIER_USABLE = MetricSpec(
    "stillroom_kv_tier_usable",
    "gauge",
    "Whether the KV tier shared with other processes can be used; 0: its circuit breaker is open, or a call hangs.",
)
TIER_OPENED = MetricSpec(
    "stillroom_kv_tier_breaker_opened_total", "counter", "How often that circuit breaker has opened."
)
TIER_FAILURES = MetricSpec("stillroom_kv_tier_failures_total", "counter", "Calls of the tier that failed or were slow.")
TIER_RECORDS = MetricSpec(
    "stillroom_kv_tier_records_total",
    "counter",
    "Records of the tier by event: found by lookups, read, missing when read, written, already there, dropped before "
    "they were written, refused by a full tier, forgotten with a removed document.",
    ("event",),
)
TIER_BYTES = MetricSpec(
    "stillroom_kv_tier_bytes_total", "counter", "Bytes of records read and written.", ("direction",)
)
TIER_FETCHED_BYTES = MetricSpec(
    "stillroom_kv_tier_fetched_bytes_total",
    "counter",
    "Bytes of KV read from the tier for waiting questions: used or wasted.",
    ("outcome",),
)
TIER_WAITING = MetricSpec(
    "stillroom_kv_tier_waiting",
    "gauge",
    "Work that waits for the tier: records to write, removed chunks to forget.",
    ("work",),
)
TIER_LATENCY = MetricSpec(
    "stillroom_kv_tier_latency_seconds", "gauge", "Seconds of a reply without bytes, moving average."
)
TIER_SPEED = MetricSpec(
    "stillroom_kv_tier_read_bytes_per_second", "gauge", "Speed of reading and verifying records, moving average."
)
KV_BLOCKS = MetricSpec("stillroom_kv_blocks", "gauge", "KV blocks, by state: free or used.", ("state",))

# Engine

ACTIVE_REQUESTS = MetricSpec(
    "stillroom_active_requests", "gauge", "Questions now, by state: waiting or running.", ("state",)
)
DEVICE_LOSSES = MetricSpec("stillroom_device_losses_total", "counter", "Losses of the model's device.")
FAILED_STEPS = MetricSpec(
    "stillroom_failed_steps_total", "counter", "Steps of the engine that failed, device losses excluded."
)
COMPUTE_THREADS = MetricSpec(
    "stillroom_compute_threads",
    "gauge",
    "CPU threads that compute now; fewer while other processes use the cores (docs/runtime.md).",
)

PROPOSED_TOKENS = MetricSpec(
    "stillroom_proposed_tokens_total",
    "counter",
    "Tokens of answers that prompt lookup proposed: accepted or rejected.",
    ("outcome",),
)

# Engines of a front, or servers of a remote engine, as this process counts its own requests

_ENGINE = ("engine",)
ENGINES_ALIVE = MetricSpec(
    "stillroom_engine_alive",
    "gauge",
    "Whether an engine may get requests of this front, 1 or 0, by its address and by its name in answers.",
    ("engine", "name"),
)
ENGINE_STREAMS = MetricSpec("stillroom_engine_streams_total", "counter", "Requests sent to an engine.", _ENGINE)
ENGINE_BROKEN = MetricSpec(
    "stillroom_engine_broken_streams_total",
    "counter",
    "Requests that an engine took and did not complete; in a cluster another engine goes on.",
    _ENGINE,
)
ENGINE_REFUSED = MetricSpec(
    "stillroom_engine_refused_streams_total",
    "counter",
    "Requests that an engine did not take: it was full, shut down, could not be reached or sent no answer.",
    _ENGINE,
)
ENGINE_LOSSES = MetricSpec(
    "stillroom_engine_losses_total",
    "counter",
    "Losses of an engine that was in use: no connection, a broken stream, another start, or no report within 2 s.",
    _ENGINE,
)
ENGINE_PREDICTED = MetricSpec(
    "stillroom_engine_predicted_first_token_seconds_total",
    "counter",
    "Sum of the predicted seconds from sending a request to its first token, waiting included.",
    _ENGINE,
)
ENGINE_FIRST_TOKEN = MetricSpec(
    "stillroom_engine_first_token_seconds_total",
    "counter",
    "Sum of the real seconds of the same requests.",
    _ENGINE,
)
ENGINE_FIRST_TOKENS = MetricSpec("stillroom_engine_first_tokens_total", "counter", "Requests in these sums.", _ENGINE)
ENGINE_RUNS = MetricSpec(
    "stillroom_engine_runs_total",
    "counter",
    "Starts of an engine that this front has used; each begins without the KV that was in memory.",
    _ENGINE,
)
ENGINE_PROMPT_TOKENS = MetricSpec(
    "stillroom_engine_prompt_tokens_total",
    "counter",
    "Tokens of this front's prompts whose reuse an engine reported.",
    _ENGINE,
)
ENGINE_CACHED_TOKENS = MetricSpec(
    "stillroom_engine_cached_tokens_total", "counter", "Of these, those whose KV was kept.", _ENGINE
)
ENGINE_OUTSTANDING = MetricSpec(
    "stillroom_engine_outstanding_requests",
    "gauge",
    "Requests of all fronts that an engine has not completed, as it last reported; absent while it gets no requests.",
    _ENGINE,
)
ENGINE_QUEUE = MetricSpec(
    "stillroom_engine_queue_seconds",
    "gauge",
    "Predicted seconds until an engine would begin a new prompt, as it last reported.",
    _ENGINE,
)
ENGINE_BLOCKS = MetricSpec(
    "stillroom_engine_kv_blocks",
    "gauge",
    "KV blocks of an engine, by state: free (kept KV included) or used, as it last reported.",
    ("engine", "state"),
)
ENGINE_KEPT_BYTES = MetricSpec(
    "stillroom_engine_kept_bytes", "gauge", "KV that an engine keeps, by tier, as it last reported.", ("engine", "tier")
)
MIGRATIONS = MetricSpec(
    "stillroom_migrations_total", "counter", "Requests that went on at another engine after a broken stream."
)

# Index and documents

INDEX_LISTS = MetricSpec(
    "stillroom_index_lists", "gauge", "Inverted lists of a tiered index, by tier: device, host or disk.", _TIER
)
INDEX_LIST_BYTES = MetricSpec("stillroom_index_list_bytes", "gauge", "Codes and ids of those lists.", _TIER)
INDEX_PROBES = MetricSpec("stillroom_index_probes_total", "counter", "Inverted lists that searches read.", _TIER)
INDEX_HIT_RATIO = MetricSpec(
    "stillroom_index_hit_ratio", "gauge", "Share of them read from RAM or a device, over the last window of searches."
)
INDEX_EXCHANGED = MetricSpec(
    "stillroom_index_exchanged_total", "counter", "Inverted lists that replaced others in RAM or on a device."
)
DOCUMENTS = MetricSpec("stillroom_documents", "gauge", "Documents in the knowledge bases of all tenants.")
CHUNKS = MetricSpec("stillroom_chunks", "gauge", "Chunks in the knowledge bases of all tenants.")
DATABASE_UP = MetricSpec(
    "stillroom_database_up",
    "gauge",
    "Whether the PostgreSQL server of the knowledge base answers, as seen once a second: 1 or 0. Absent "
    "for a knowledge base in a folder.",
)
COPY_AGE = MetricSpec(
    "stillroom_database_copy_age_seconds",
    "gauge",
    "Seconds since this machine's copy was last known to show the database's present state.",
)

# HTTP

REFUSED_REQUESTS = MetricSpec(
    "stillroom_refused_requests_total",
    "counter",
    "HTTP requests refused, by reason: rate, concurrency, queue or closing.",
    ("reason",),
    from_zero=("rate", "concurrency", "queue", "closing"),
)
HTTP_REQUESTS = MetricSpec(
    "stillroom_http_requests_total", "counter", "HTTP requests, by route and status code.", ("path", "status")
)

SPECS = tuple(value for value in list(globals().values()) if isinstance(value, MetricSpec))


def reference() -> str:
    """Return all metrics as a Markdown table."""
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for spec in SPECS:
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        rows.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.help} |")
    return "\n".join(rows) + "\n"
