"""What a cache and an index count by themselves, for `metrics`. Plain numbers; counts only grow."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditMetrics:
    """Answers from placed KV that were compared with a full prefill."""

    results: Mapping[str, int]
    """`agreed`, `differed`."""
    disagreement_bound: float
    recompute_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFigures:
    """What a KV cache holds and did, by tier (`device`, `host`, `disk`) or tiers copied between. Counts only grow."""

    num_nodes: Mapping[str, int]
    num_bytes: Mapping[str, int]
    hits: Mapping[str, int]
    hit_tokens: Mapping[str, int]
    misses: int
    missed_tokens: int
    cheaper: int
    """Of the misses: kept, but slower to load than to compute."""
    placed: Mapping[str, int]
    placed_tokens: int
    repaired_tokens: int
    placed_overlap: float
    placed_overhead: float
    unfocused: int
    evictions: Mapping[str, int]
    failed_loads: Mapping[str, int]
    rejected: int
    moves: Mapping[tuple[str, str], int]
    moved_bytes: Mapping[tuple[str, str], int]
    moved_seconds: Mapping[tuple[str, str], float]
    verify_failures: Mapping[tuple[str, str], int]
    """By tier and reason."""
    write_failures: int
    read_ahead_bytes: Mapping[str, int]
    """`used`, `wasted`."""
    audit: AuditMetrics | None = None
    """None where nothing is audited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """What went wrong in an engine. Counts only grow."""

    device_losses: int
    failed_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFigures:
    """What a tiered index holds and did, by tier: `device`, `ram`, `disk`. Counts only grow, or begin anew."""

    num_lists: Mapping[str, int]
    num_bytes: Mapping[str, int]
    probes: Mapping[str, int]
    hit_ratio: float
    exchanged: int
