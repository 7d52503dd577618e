"""Options and arms of `stillroom bench reuse`. Imports nothing heavy, because flags are generated from them."""

from dataclasses import dataclass
from pathlib import Path

from stillroom.errors import UsageError
from stillroom_bench.instrument.option_flags import (
    companions_flag,
    dataset_flag,
    flag,
    model_flag,
    named_pythons,
    peers_flag,
    repeat_flag,
    seed_flag,
)
from stillroom_bench.loads.popularity import Companions, check_traffic

OFF = "off"
DEFAULT_ARMS = ("off", "lru", "pgdsf", "tiers")
"""No reuse; LRU on the device only, as in prefix caching; device, host and disk with RAGCache's eviction policy; the
same with Stillroom's default policy."""
REUSE_RATIOS = {"anywhere 15%": 0.15, "anywhere 30%": 0.3}
"""Like `tiers`, with reuse at any position; the value is the share of reused tokens that is recomputed."""
CACHE_FIRST = "cache first"
"""Like `tiers`, with RAGCache's admission order (5.2)."""
ARMS = (*DEFAULT_ARMS, CACHE_FIRST, *REUSE_RATIOS)
LEAST_VECTORS = 20_000
"""Minimum size of the index of `stillroom bench reuse --search`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseOptions:
    """Options of `stillroom bench reuse`."""

    dataset: Path | None = dataset_flag()
    model: Path | None = model_flag()
    curves: tuple[str, ...] = flag(("mmlu",), "Popularity curve of the documents.", "--curve", metavar="mmlu|nq")
    ks: tuple[int, ...] = flag((2,), "Documents in a prompt.", "--k", min=1)
    rates: tuple[float, ...] = flag(
        (0.3, 0.6, 0.9, 1.3, 2.0, 3.0), "Request rate, as a multiple of the sequential throughput of `off`.", "--rate"
    )
    num_requests: int = flag(25, "Requests at each rate.", "--requests", min=1)
    num_warm: int = flag(80, "Sequential warm-up requests, which are not measured.", "--warmup", min=1)
    num_documents: int = flag(300, "Maximum number of documents.", "--documents", min=1)
    companions: Companions = companions_flag("drawn")
    max_tokens: int = flag(1, "Tokens of an answer.", min=1)
    num_vectors: int = flag(
        0,
        "Search a FAISS index of this many generated vectors before each prompt, in every runtime; peers also need "
        "faiss-cpu. 0: no search.",
        "--search",
        metavar="VECTORS",
        min=0,
    )
    arrivals: Path | None = flag(
        None,
        "Trace of arrival times, scaled to the given rates: Azure's .csv or Mooncake's .jsonl; without it, a Poisson "
        "process.",
        path="file",
    )
    slo_ttft: float = flag(1.0, "Target of time to first token; goodput counts requests within it.", metavar="SECONDS")
    arms: tuple[str, ...] = flag(
        DEFAULT_ARMS,
        "off (required), lru, pgdsf, tiers, 'cache first', 'anywhere 15%' or 'anywhere 30%'.",
        "--arm",
        metavar="NAME",
    )
    peers: tuple[str, ...] = peers_flag()
    repeat: int = repeat_flag(2, "Runs, each with fresh caches.")
    seed: int = seed_flag()

    def __post_init__(self) -> None:
        """Check the options; raises UsageError if a value is invalid."""
        check_traffic(self.curves, self.companions)
        named_pythons(self.peers)
        if not self.rates or min(self.rates) <= 0:
            raise UsageError(f"rates {self.rates} must be positive multiples of the throughput; see --rate")
        if unknown := set(self.arms) - set(ARMS):
            raise UsageError(f"unknown arms {', '.join(sorted(unknown))}; known are {', '.join(ARMS)}")
        if OFF not in self.arms:
            raise UsageError(f"rates are multiples of the throughput of `{OFF}`; add --arm {OFF}")
        if 0 < self.num_vectors < LEAST_VECTORS:
            raise UsageError(f"--search {self.num_vectors:,} is too small; give {LEAST_VECTORS:,} vectors or more")
        if self.slo_ttft <= 0:
            raise UsageError(f"--slo-ttft {self.slo_ttft:g} must be a positive number of seconds")
