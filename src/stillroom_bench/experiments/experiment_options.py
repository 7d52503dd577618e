"""Option classes of the papers' experiments. Imports nothing heavy, because flags are generated from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stillroom.config.settings import Dtype
from stillroom.errors import UsageError
from stillroom.models.bundled_models import MICROWORLD
from stillroom_bench.instrument.option_flags import (
    REQUIRED,
    companions_flag,
    dataset_flag,
    datasets_flag,
    device_flag,
    flag,
    model_flag,
    named_pythons,
    peers_flag,
    repeat_flag,
    seed_flag,
    size_flag,
)
from stillroom_bench.loads.popularity import Companions, check_traffic

SYSTEM_TOKENS = 32
"""Tokens of the system prompt of `bench anywhere` and `bench preloading`."""
EXPERIMENTS = (
    "overall, top-k, large-models, policies, reordering, speculation, scheduling, cache-craft, cache-craft-times, "
    "prefix-costs or held-out (what was no input of the models)"
)
SHARES = (0.125, 0.25, 0.5, 1.0)
"""Shares of the lists that a search probes, as in RAGCache's Figure 19."""


@dataclass(frozen=True, slots=True)
class StructuresOptions:
    """Options of `stillroom bench structures`."""

    repeat: int = repeat_flag(10)
    seed: int = seed_flag()
    operations: int = flag(20_000, "Operations per run of an arm.", min=100)


@dataclass(frozen=True, slots=True)
class ComponentsOptions:
    """Options of `stillroom bench components`."""

    repeat: int = repeat_flag(10)
    num_requests: int = flag(1000, "Requests that wait for the scheduler.", "--requests", min=32)
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class PoliciesOptions:
    """Options of `stillroom bench policies`."""

    data: Path | None = flag(None, "A folder with traces/.", path="folder")
    num_asks: int = flag(1500, "Maximum number of requests of a workload.", "--requests", min=10)
    top_ks: tuple[int, ...] = flag((1, 2, 3, 5), "Documents of a request.", "--top-k", metavar="K", min=1)
    capacities: tuple[float, ...] = flag(
        (0.02, 0.05, 0.1, 0.2, 0.4), "Share of all KV that fits.", "--capacity", min=0.001, max=1.0
    )
    repeat: int = repeat_flag(1, "Number of seeds of the generated workloads.")
    seed: int = seed_flag()
    changing: bool = flag(
        False,
        "Instead, compare where costs per token differ and popular documents change; give --repeat for intervals.",
    )
    anywhere: bool = flag(False, "Instead, compare under reuse at any position; give --repeat for intervals.")
    recorded: bool = flag(
        False,
        "Instead, replay windows of --requests requests of the traces in --data that nothing was chosen on, --repeat "
        "of each.",
    )


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of `stillroom bench attention`."""

    questions: Path = flag(REQUIRED, "A file of questions, or a data set.", metavar="PATH")
    model: str = flag(MICROWORLD, "A checkpoint folder, a hub name, or a bundled decoder.")
    num_questions: int | None = flag(None, "Maximum number of questions.", "--limit", min=1)
    num_chunks: int | None = flag(None, "Maximum number of documents of a question.", "--chunks", min=2)
    max_words: int | None = flag(None, "Maximum number of words of a document; longer ones are cut.", "--words", min=1)
    num_before: int = flag(
        4, "Largest number of documents before the one whose deviation is measured.", "--before", min=1
    )
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class ConvergenceOptions:
    """Options of `stillroom bench convergence`."""

    datasets: tuple[Path, ...] = datasets_flag()
    size: int = flag(20_000, "Vectors in the dense indexes.", min=100)
    num_stages: int = flag(8, "Stages of a search.", "--stages", min=2)
    repeat: int = repeat_flag(7)
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class PreparedBenchOptions:
    """Options of `stillroom bench prepared`."""

    num_documents: int = flag(6, "Documents.", "--documents", min=2)
    document_chunks: int = flag(5, "Chunks of each document.", "--document-chunks", min=1)
    num_chunks: int = flag(5, "Chunks in a prompt.", "--chunks", min=2)
    chunk_tokens: int = flag(200, "Tokens of each chunk.", min=1)
    num_beside: int = flag(
        40, "Pairs of questions, one of each while a document is prepared; 0: none.", "--beside", min=0
    )
    repeat: int = repeat_flag(15)
    seed: int = seed_flag()
    dtype: Dtype = flag("bfloat16", "Type of weights and KV: float32 or bfloat16.")
    device: Literal["cpu", "cuda"] = device_flag()
    size: Literal["135m", "1.5b"] = size_flag()
    question_tokens: int = 32

    def __post_init__(self) -> None:
        """Raises UsageError: a prompt needs more chunks than there are."""
        if self.num_chunks > self.num_documents * self.document_chunks:
            raise UsageError(f"there are fewer than {self.num_chunks} chunks; raise --documents or --document-chunks")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstQuestionsOptions:
    """Options of `stillroom bench first-questions`."""

    num_questions: int = flag(60, "Questions of a workload.", "--questions", min=6)
    first_share: float = flag(
        1 / 3,
        "Share of the questions about documents that no earlier question asked for; decides the number of documents.",
        "--first-share",
        metavar="SHARE",
        min=0.05,
        max=0.9,
    )
    zipf: float = flag(1.2, "Zipf exponent of the documents' popularity.", min=0.0, max=3.0)
    budgets: tuple[float, ...] = flag(
        (0.0, 0.05, 0.25, 1.0), "Share of all chunks' KV that prepare.disk_bytes holds.", "--budget", min=0.0, max=1.0
    )
    anywhere: bool = flag(False, "Also measure reuse.mode = anywhere.")
    document_chunks: int = flag(6, "Chunks of each document.", "--document-chunks", min=1)
    num_chunks: int = flag(5, "Chunks in a prompt.", "--chunks", min=2)
    chunk_tokens: int = flag(200, "Tokens of each chunk.", min=1)
    companions: Companions = flag(
        "fixed",
        "Chunks that questions about the same document find: fixed, always the same, which is best for kept prefixes, "
        "or drawn anew for each question.",
        metavar="drawn|fixed",
    )
    repeat: int = repeat_flag(1, "Workloads, each with its own seed and fresh caches.")
    seed: int = seed_flag()
    dtype: Dtype = flag("bfloat16", "Type of weights and KV: float32 or bfloat16.")
    question_tokens: int = 32

    def __post_init__(self) -> None:
        """Raises UsageError: a search cannot return so many chunks, or a value is unknown."""
        check_traffic((), self.companions)
        if self.num_chunks > 3 * self.document_chunks:
            raise UsageError(
                f"a search returns chunks of 3 documents, which have fewer than {self.num_chunks}; raise "
                "--document-chunks"
            )


@dataclass(frozen=True, slots=True)
class AnywhereBenchOptions:
    """Options of `stillroom bench anywhere`, and of `stillroom bench preloading` with one ratio."""

    ratios: tuple[float, ...] = flag(
        (0.0, 0.15, 0.3), "Share of tokens that is recomputed.", "--ratio", min=0.0, max=1.0
    )
    num_chunks: int = flag(5, "Documents in a prompt.", "--chunks", min=2)
    chunk_tokens: int = flag(200, "Tokens of each document.", min=1)
    num_lasting: int = flag(0, "Number of shuffled questions; 0 omits them.", "--lasting", min=0)
    num_documents: int = flag(300, "Documents that shuffled questions draw from.", "--documents", min=2)
    peers: tuple[str, ...] = peers_flag("kvboost")
    repeat: int = repeat_flag(10)
    seed: int = seed_flag()
    question_tokens: int = 32
    dtype: Dtype = "bfloat16"

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UsageError: a shuffled question needs more documents than there are, or a peer has no Python.
        """
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
    """Options of `stillroom bench preloading`."""

    ratio: float = flag(0.15, "Share of tokens that is recomputed.", min=0.0, max=1.0)
    num_chunks: int = flag(5, "Documents in a prompt.", "--chunks", min=2)
    chunk_tokens: int = flag(200, "Tokens of each document.", min=1)
    repeat: int = repeat_flag(10)
    seed: int = seed_flag()

    def as_anywhere(self) -> AnywhereBenchOptions:
        """Return options that give the same prompts as `bench anywhere`."""
        return AnywhereBenchOptions(
            (self.ratio,), self.num_chunks, self.chunk_tokens, repeat=self.repeat, seed=self.seed
        )


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Options of `stillroom bench pipeline speculation`."""

    datasets: tuple[Path, ...] = datasets_flag()
    size: int = flag(500_000, "Vectors in the index.", min=10_000)
    num_questions: int = flag(32, "Questions per run of an arm.", "--questions", min=1)
    shares: tuple[float, ...] = flag(SHARES, "Share of the lists that is probed.", "--share", min=0.001, max=1.0)
    num_clients: tuple[int, ...] = flag(
        (1, 4), "Concurrent questions; more than one only with half of the lists probed.", "--clients", min=1
    )
    num_stages: int = flag(4, "Stages of a search.", "--stages", min=2)
    on_disk: bool = flag(
        False,
        "Keep the index on disk and drop it from the page cache before each search. Then only one question at a time "
        "is measured; --work-dir should be on the disk to measure.",
        "--on-disk",
    )
    allowed: float = flag(
        1.0, "Share of the chunks that a filter allows, drawn at random; 1 is no filter.", min=0.001, max=1.0
    )
    k: int = flag(2, "Documents in a prompt.", min=1)
    document_tokens: int | None = flag(
        None, "Tokens of each document. Without it, as many as its text has.", metavar="N", min=1
    )
    repeat: int = repeat_flag(5)
    seed: int = seed_flag()
    nbits: int = 8
    """Bits of the index's codes; 8 need ten thousand training vectors."""
    zipf: float = 0.8
    """Zipf exponent of the questions' popularity."""
    one_thread: bool = True
    """Whether to also measure with one thread less for the model, which leaves a core to the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReorderingOptions:
    """Options of `stillroom bench pipeline reordering`."""

    dataset: Path | None = dataset_flag()
    model: Path | None = model_flag()
    curve: str = flag("mmlu", "Popularity curve of the documents.", metavar="mmlu|nq")
    k: int = flag(2, "Documents in a prompt.", min=1)
    companions: Companions = companions_flag("drawn")
    loads: tuple[float, ...] = flag(
        (1.5,), "Request rate, as a multiple of the throughput in order of arrival.", "--load"
    )
    windows: tuple[int, ...] = flag(
        (1, 8, 32, 128),
        "Starvation window: later requests that may be admitted before a waiting one.",
        "--window",
        min=0,
    )
    num_requests: int = flag(150, "Requests in a run.", "--requests", min=1)
    num_warm: int = flag(40, "Warm-up requests, which are not measured.", "--warmup", min=1)
    num_documents: int = flag(100, "Maximum number of documents.", "--documents", min=1)
    device_share: float = flag(
        0.02, "Share of all documents' KV that fits on the device in addition to running requests.", min=0.0
    )
    host_share: float = flag(0.0, "Share of all documents' KV that fits on the host.", min=0.0)
    repeat: int = repeat_flag(3, "Runs, each with fresh caches.")
    seed: int = seed_flag()

    def __post_init__(self) -> None:
        """Check the options; raises UsageError if a value is invalid."""
        check_traffic((self.curve,), self.companions)
        if not self.loads or min(self.loads) <= 0:
            raise UsageError(f"loads {self.loads} must be positive multiples of the throughput; see --load")
        if not self.windows or min(self.windows) < 0:
            raise UsageError(f"windows {self.windows} must be 0 or more requests; see --window")
        if min(self.device_share, self.host_share) < 0:
            raise UsageError("--device-share and --host-share must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of `stillroom bench simulate`."""

    experiments: tuple[str, ...] = flag((), f"{EXPERIMENTS}; default: all.", "--experiment", metavar="NAME")
    validate: bool = flag(False, "Only compare the simulation with the runtime on this machine.")
    num_requests: int = flag(500, "Requests at each rate.", "--requests", min=1)
    num_warm: int = flag(1000, "Warm-up requests, which are not measured.", "--warmup", min=1)
    num_documents: int = flag(1500, "Number of documents.", "--documents", min=1)
    companions: Companions = companions_flag("fixed")
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Options of `stillroom bench cluster`."""

    experiments: tuple[str, ...] = flag(
        ("traces",), "traces, generated, age, changes or tier.", "--experiment", metavar="NAME"
    )
    data: Path | None = flag(None, "A folder with rag_*.json, traces of retrieved passages.", path="folder")
    traces: tuple[str, ...] = flag(
        (), "Traces, as musique for rag_musique.json; default: all.", "--trace", metavar="NAME"
    )
    engines: tuple[int, ...] = flag((4, 16), "Engines of the cluster.", "--engines", metavar="N", min=1)
    modes: tuple[str, ...] = flag(
        ("anywhere",), "Reuse of KV: exact, anywhere or prepared (traces only).", "--mode", metavar="NAME"
    )
    copies: int = flag(1, "With --mode prepared: engines that prepare each document, by hash; 0: all of them.", min=0)
    arms: tuple[str, ...] = flag((), "Routers of traces and generated; default: all.", "--arm", metavar="NAME")
    load: float = flag(0.8, "Requests per second, as a share of the throughput without reuse.", min=0.01)
    machine: str = flag("llama3-8b-a100", "Modelled machine: a name or a .toml file.", metavar="NAME")
    popularity: float = flag(
        0.0, "Exponent of Zipf's law by which recorded questions are repeated; 0: each is asked once.", min=0.0
    )
    num_requests: int = flag(
        0, "Requests, half of them to warm up; 0: all of a trace, and 200 for each engine.", "--requests", min=0
    )
    arrivals: Path | None = flag(None, "Trace of arrival times; default: a Poisson process.", path="file")
    repeat: int = repeat_flag(5, "Repetitions, each with other orders and times.")
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class TieredOptions:
    """Options of `stillroom bench tiered`: sizes, and which of its benchmarks runs."""

    size: int = flag(2_000_000, "Vectors of 384 dimensions.", min=1000)
    nlist: int = flag(4096, "Inverted lists.", "--lists", min=16)
    nprobe: int = flag(64, "Lists that a search probes.", "--probes", min=1)
    shares: tuple[float, ...] = flag((0.1, 0.2, 0.3), "Share of the lists in RAM.", "--share", min=0.01, max=0.99)
    batch_sizes: tuple[int, ...] = flag((1, 4, 16), "Questions per batch.", "--batch", min=1)
    drift: bool = flag(False, "Instead, measure how the index adapts when the popular topics change.")
    half_lives: tuple[float, ...] = flag(
        (), "With --drift: questions after which the weight of an access halves.", "--half-life", metavar="N", min=1
    )
    predict: bool = flag(False, "Instead, compare predicted with measured throughput.")
    answers: bool = flag(
        False, "Instead, measure times to first token with a model of 135 million parameters, for several targets."
    )
    together: bool = flag(
        False, "With --answers: also measure batches whose questions all wait for the last, without the dispatcher."
    )
    parts: bool = flag(False, "Instead, measure the parts of a search: coarse search, look-up tables, scan.")
    repeat: int = repeat_flag(5)
    seed: int = seed_flag()
    num_batches: int = 16
    """Maximum number of batches of one run of an arm; large batches run fewer times."""
