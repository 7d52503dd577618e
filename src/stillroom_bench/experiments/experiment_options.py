"""Options of the papers' experiments. Imports nothing heavy: the flags of `stillroom bench` are made from these."""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from stillroom.config.settings import Dtype
from stillroom.errors import UsageError
from stillroom_bench.instrument.option_flags import (
    companions_flag,
    dataset_flag,
    datasets_flag,
    flag,
    model_flag,
    named_pythons,
    peers_flag,
    repeat_flag,
    seed_flag,
)
from stillroom_bench.loads.popularity import CURVES, Companions

SYSTEM_TOKENS = 32
"""Of the system prompt of `bench anywhere` and `bench preloading`."""
EXPERIMENTS = "overall, top-k, large-models, policies, reordering, speculation, scheduling or cache-craft"
OFF = "off"
DEFAULT_ARMS = ("off", "lru", "pgdsf", "tiers")
"""Nothing is kept; on the device only, the least recently used leaves (what prefix caching gives); device, host and
disk, under RAGCache's policy and under ours, which is the default."""
REUSE_RATIOS = {"anywhere 15%": 0.15, "anywhere 30%": 0.3}
"""As `tiers`, and documents are reused wherever they stand, with this share of their tokens computed again."""
CACHE_FIRST = "cache first"
"""As `tiers`, with RAGCache's order of admission (5.2)."""
ARMS = (*DEFAULT_ARMS, CACHE_FIRST, *REUSE_RATIOS)
LEAST_VECTORS = 20_000
"""Of the index that `stillroom bench reuse --search` makes."""
SHARES = (0.125, 0.25, 0.5, 1.0)
"""Of the lists that a search reads, as in RAGCache's Figure 19."""
_FRESH = "Runs, each with fresh caches."


@dataclass(frozen=True, slots=True)
class StructuresOptions:
    """Of `stillroom bench structures`."""

    repeat: int = repeat_flag(10)
    seed: int = seed_flag()
    operations: int = flag(20_000, "Operations per run of an arm.", min=100)


@dataclass(frozen=True, slots=True)
class PoliciesScope:
    """Of `stillroom bench policies`."""

    data: Path | None = flag(None, "A folder with traces/.", path="folder")
    num_asks: int = flag(1500, "Requests of a workload, at most.", "--requests", min=10)
    top_ks: tuple[int, ...] = flag((1, 2, 3, 5), "Documents of a request.", "--top-k", metavar="K", min=1)
    capacities: tuple[float, ...] = flag(
        (0.02, 0.05, 0.1, 0.2, 0.4), "Share of all KV that fits.", "--capacity", min=0.001, max=1.0
    )
    repeat: int = repeat_flag(1, "Seeds of the made workloads.")
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class ConvergenceOptions:
    """Of `stillroom bench convergence`."""

    datasets: tuple[Path, ...] = datasets_flag()
    size: int = flag(20_000, "Vectors in the dense indexes.", min=100)
    num_stages: int = flag(8, "Stages of a search.", "--stages", min=2)
    repeat: int = repeat_flag(7)
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class AnywhereScope:
    """Of `stillroom bench anywhere`, and of `stillroom bench preloading` with one ratio."""

    ratios: tuple[float, ...] = flag(
        (0.0, 0.15, 0.3), "Share of tokens that is recomputed.", "--ratio", min=0.0, max=1.0
    )
    num_chunks: int = flag(5, "Documents in a prompt.", "--chunks", min=2)
    chunk_tokens: int = flag(200, "Tokens of each document.", min=1)
    num_lasting: int = flag(0, "Shuffled questions; 0: none.", "--lasting", min=0)
    num_documents: int = flag(300, "Documents that shuffled questions are over.", "--documents", min=2)
    peers: tuple[str, ...] = peers_flag("kvboost")
    repeat: int = repeat_flag(10)
    seed: int = seed_flag()
    question_tokens: int = 32
    dtype: Dtype = "bfloat16"

    def __post_init__(self) -> None:
        """Raises UsageError where there are fewer documents than a shuffled question has, or a peer has no Python."""
        named_pythons(self.peers)
        if self.num_lasting and self.num_documents < self.num_chunks:
            raise UsageError(
                f"{self.num_documents} documents are too few for prompts of {self.num_chunks}; raise --documents"
            )

    @property
    def prompt_tokens(self) -> int:
        return SYSTEM_TOKENS + self.num_chunks * self.chunk_tokens + self.question_tokens


@dataclass(frozen=True, slots=True)
class PreloadingOptions:
    """Of `stillroom bench preloading`."""

    ratio: float = flag(0.15, "Share of tokens that is recomputed.", min=0.0, max=1.0)
    num_chunks: int = flag(5, "Documents in a prompt.", "--chunks", min=2)
    chunk_tokens: int = flag(200, "Tokens of each document.", min=1)
    repeat: int = repeat_flag(10)
    seed: int = seed_flag()

    def scope(self) -> AnywhereScope:
        """Return the same prompts as of `bench anywhere`."""
        return AnywhereScope((self.ratio,), self.num_chunks, self.chunk_tokens, repeat=self.repeat, seed=self.seed)


@dataclass(frozen=True, slots=True)
class SpeculationScope:
    """Of `stillroom bench pipeline speculation`."""

    datasets: tuple[Path, ...] = datasets_flag()
    size: int = flag(500_000, "Vectors in the index.", min=10_000)
    num_questions: int = flag(32, "Questions per run of an arm.", "--questions", min=1)
    shares: tuple[float, ...] = flag(SHARES, "Share of the lists that is searched.", "--share", min=0.001, max=1.0)
    num_clients: tuple[int, ...] = flag(
        (1, 4), "Questions at the same time; more than one only with half of the lists.", "--clients", min=1
    )
    num_stages: int = flag(4, "Stages of a search.", "--stages", min=2)
    repeat: int = repeat_flag(5)
    seed: int = seed_flag()
    nbits: int = 8
    """Of the index's codes; 8 need ten thousand vectors to train on."""
    zipf: float = 0.8
    """How much more often popular questions are asked."""
    one_thread: bool = True
    """Also measure with one thread less for the model, which leaves a core to the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReorderingOptions:
    """Of `stillroom bench pipeline reordering`."""

    dataset: Path | None = dataset_flag()
    model: Path | None = model_flag()
    curve: str = flag("mmlu", "How unequally documents are asked for.", metavar="mmlu|nq")
    k: int = flag(2, "Documents in a prompt.", min=1)
    companions: Companions = companions_flag("drawn")
    loads: tuple[float, ...] = flag((1.5,), "Request rate, times what the order of arrival manages.", "--load")
    windows: tuple[int, ...] = flag(
        (1, 8, 32, 128), "Later requests that may be admitted before one that waits.", "--window", min=0
    )
    num_requests: int = flag(150, "Requests in a run.", "--requests", min=1)
    num_warm: int = flag(40, "Requests before they count.", "--warmup", min=1)
    num_documents: int = flag(100, "Most documents.", "--documents", min=1)
    device_share: float = flag(
        0.02, "Share of all documents' KV that fits on the device beside what running requests need.", min=0.0
    )
    host_share: float = flag(0.0, "Share of all documents' KV that fits on the host.", min=0.0)
    repeat: int = repeat_flag(3, _FRESH)
    seed: int = seed_flag()

    def __post_init__(self) -> None:
        """Raises UsageError where a value is not possible."""
        _check_traffic((self.curve,), self.companions)
        if not self.loads or min(self.loads) <= 0:
            raise UsageError("loads are positive numbers, times what the order of arrival manages")
        if not self.windows or min(self.windows) < 0:
            raise UsageError("windows are numbers of later requests that may go first, 0 or more")
        if min(self.device_share, self.host_share) < 0:
            raise UsageError("shares of the documents' KV are not negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseOptions:
    """Of `stillroom bench reuse`."""

    dataset: Path | None = dataset_flag()
    model: Path | None = model_flag()
    curves: tuple[str, ...] = flag(("mmlu",), "How unequally documents are asked for.", "--curve", metavar="mmlu|nq")
    ks: tuple[int, ...] = flag((2,), "Documents in a prompt.", "--k", min=1)
    rates: tuple[float, ...] = flag(
        (0.3, 0.6, 0.9, 1.3, 2.0, 3.0), "Request rate, times what `off` serves one after the other.", "--rate"
    )
    num_requests: int = flag(25, "Requests at each rate.", "--requests", min=1)
    num_warm: int = flag(80, "Requests before they count, one after the other.", "--warmup", min=1)
    num_documents: int = flag(300, "Most documents.", "--documents", min=1)
    companions: Companions = companions_flag("drawn")
    max_tokens: int = flag(1, "Tokens of an answer.", min=1)
    num_vectors: int = flag(
        0,
        "Search a FAISS index of so many made vectors before each prompt, in every runtime; peers need faiss-cpu, too. "
        "0: no search.",
        "--search",
        metavar="VECTORS",
        min=0,
    )
    arrivals: Path | None = flag(
        None,
        "A trace to take the moments of requests from, at the given rates: Azure's .csv or Mooncake's .jsonl; without "
        "it, a Poisson process.",
        path="file",
    )
    slo_ttft: float = flag(1.0, "Goodput counts requests whose first token comes within it.", metavar="SECONDS")
    arms: tuple[str, ...] = flag(
        DEFAULT_ARMS,
        "off (always needed), lru, pgdsf, tiers, 'cache first', 'anywhere 15%' or 'anywhere 30%'.",
        "--arm",
        metavar="NAME",
    )
    peers: tuple[str, ...] = peers_flag()
    repeat: int = repeat_flag(2, _FRESH)
    seed: int = seed_flag()

    def __post_init__(self) -> None:
        """Raises UsageError where a value is not possible."""
        _check_traffic(self.curves, self.companions)
        named_pythons(self.peers)
        if not self.rates or min(self.rates) <= 0:
            raise UsageError("rates are positive numbers, times what is served without reuse")
        if unknown := set(self.arms) - set(ARMS):
            raise UsageError(f"unknown arms {', '.join(sorted(unknown))}; known are {', '.join(ARMS)}")
        if OFF not in self.arms:
            raise UsageError(f"rates are multiples of what `{OFF}` serves; add --arm {OFF}")
        if 0 < self.num_vectors < LEAST_VECTORS:
            raise UsageError(f"--search {self.num_vectors:,} is too small an index; take {LEAST_VECTORS:,} or more")
        if self.slo_ttft <= 0:
            raise UsageError("--slo-ttft is a positive number of seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Of `stillroom bench simulate`."""

    experiments: tuple[str, ...] = flag((), f"{EXPERIMENTS}; without it, all of them.", "--experiment", metavar="NAME")
    validate: bool = flag(False, "Compare the simulation with the runtime on this machine, and nothing else.")
    num_requests: int = flag(500, "Requests at each rate.", "--requests", min=1)
    num_warm: int = flag(1000, "Requests before they count.", "--warmup", min=1)
    num_documents: int = flag(1500, "Documents asked for.", "--documents", min=1)
    companions: Companions = companions_flag("fixed")
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class TieredScope:
    """Of `stillroom bench tiered`: its sizes, which of its benchmarks runs, and with what."""

    size: int = flag(2_000_000, "Vectors, of 384 dimensions.", min=1000)
    nlist: int = flag(4096, "Inverted lists.", "--lists", min=16)
    nprobe: int = flag(64, "Lists that a search reads.", "--probes", min=1)
    shares: tuple[float, ...] = flag((0.1, 0.2, 0.3), "Share of the lists in RAM.", "--share", min=0.01, max=0.99)
    batch_sizes: tuple[int, ...] = flag((1, 4, 16), "Questions at a time.", "--batch", min=1)
    drift: bool = flag(False, "Shift the topics instead.")
    half_lives: tuple[float, ...] = flag(
        (), "With --drift: questions after which an access counts half.", "--half-life", metavar="N", min=1
    )
    predict: bool = flag(False, "Predicted beside measured throughput, and nothing else.")
    answers: bool = flag(
        False, "Times to first token with a model of 135 million parameters behind the search, for several targets."
    )
    repeat: int = repeat_flag(5)
    seed: int = seed_flag()
    num_batches: int = 16
    """Of one run of an arm, at most; fewer of large ones."""


def _check_traffic(curves: tuple[str, ...], companions: str) -> None:
    if unknown := set(curves) - set(CURVES):
        raise UsageError(f"unknown curves {', '.join(sorted(unknown))}; known are {', '.join(CURVES)}")
    if companions not in get_args(Companions):
        raise UsageError(f"unknown companions {companions!r}; known are {', '.join(get_args(Companions))}")
