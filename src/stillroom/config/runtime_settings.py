"""Settings of the runtime in this process: the decoder and its step loop, kept KV, speculation.

Users import them from `config.settings`.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from stillroom.config.quantities import AboveZero, AtLeastZero, Range, Share, check_ranges
from stillroom.config.retrieval_settings import Dtype

BUNDLED_MODEL = "bundled"
"""The model name that stands for the small model inside the package."""

ReuseMode = Literal["exact", "anywhere", "off"]
TokenSelector = Literal["question", "question_mean", "context", "received", "deviation", "first", "random"]
RecomputeBudget = Literal["ratio", "cfo"]
SchedulingPolicy = Literal["first_come", "cache_first", "shortest_first"]
EvictionPolicy = Literal["prefix_heat", "pgdsf", "gdsf", "lru", "lfu", "tamm", "reusability"]
LoadChoice = Literal["measured", "always"]
Speculation = Literal["auto", "on", "off"]
Preload = Literal["off", "layers"]
Weights = Literal["checkpoint", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """The decoder and its step loop."""

    model: str = BUNDLED_MODEL
    """`bundled`, `bundled:NAME`, a folder with a Hugging Face checkpoint, or a hub name."""
    device: str = "auto"
    """`auto`: cuda where there is a GPU, else cpu; or any torch device name."""
    dtype: Dtype = "auto"
    """`auto`: the checkpoint's own."""
    weights: Weights = "checkpoint"
    """`int8`: rounded to 8 bits while loading, half the memory of bfloat16 and faster decoding on a CPU; answers may
    differ. Measured in docs/runtime-bench.md."""
    max_model_len: AtLeastZero = 0
    """Most tokens of a prompt with its answer. 0: the model's own limit; for a longrope model (Phi-3 128k) the length
    it was first trained for, because longer ones need other rotary frequencies, and then for every prompt."""
    block_size: int = 16
    """Tokens per KV block. Larger: shorter block tables, coarser sharing."""
    kv_bytes: int = 2 * 1024**3
    """Memory for KV blocks on the device: of running requests, and what is kept there for the next ones. On a CPU pages
    that were never written cost nothing."""
    num_threads: Annotated[int, Range(0, 1024)] = 0
    """CPU threads that compute. 0: as many as are fastest when the model is loaded, which beside other busy processes
    can be fewer than there are cores; `OMP_NUM_THREADS` is respected."""
    max_num_seqs: int = 32
    """Requests that run at the same time; others wait."""
    scheduling: SchedulingPolicy = "first_come"
    """Who waits no longer: `first_come`; `cache_first`, who finds most of his prompt kept, for what is left to compute
    (RAGCache 5.2); or `shortest_first`, who has least to compute. Tenants that were served less, and of a tenant's
    requests those of a higher priority (a lower number), go before that."""
    starvation_window: AtLeastZero = 32
    """Later requests that may be admitted before one that waits."""
    max_waiting: AtLeastZero = 1024
    """Requests that may wait; one more is refused (HTTP 429). 0: no limit."""
    batch_delay_ms: float = 0.0
    """How long the first request of an idle engine waits for others, so that they are computed together; less if they
    fill a step before. 0: not at all."""
    max_num_batched_tokens: int = 512
    """Token budget of one step. Larger: faster prefill, longer gaps between the tokens of running requests."""
    fixed_shapes: bool = False
    """Compute each piece of a prompt (system prompt, document, 64 tokens of the question) in a step of its own. Then
    reuse of exact prefixes changes nothing bit for bit in bfloat16 too, while one request runs at a time. Slower:
    small documents do not fill a step, and prompts are not computed together (docs/knowledge-tree.md)."""
    request_timeout_s: float = 600.0
    """Seconds a request may take. One that takes longer is started again once, with its tokens and its kept KV, and
    given up after as long again. 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseConfig:
    """KV that is kept for the next prompt that begins alike. See docs/knowledge-tree.md."""

    mode: ReuseMode = "exact"
    """`exact`: KV is reused where the same tokens stood after the same tokens. In float32 no token changes; in bfloat16
    near ties can (4 of 200 answers), unless `runtime.fixed_shapes` is on. `anywhere`: beyond that, a document's KV is
    reused wherever it stands in a prompt, and a share of its tokens is computed again; answers may change
    (docs/chunk-reuse.md). `off`: every prompt is computed."""
    recompute_ratio: Share = 0.15
    """With `anywhere`: share of the tokens of documents reused at another place that is computed again, in [0, 1]. More
    is slower and closer to computing everything, which 1 is."""
    recompute_budget: RecomputeBudget = "ratio"
    """`ratio`: that share. `cfo`: each document's own share, by how much it owes to the documents that stood before it
    and how few of them stand there again (Cache-Craft's CFO), times `alpha`."""
    alpha: float = 1.0
    """Scales the shares of `cfo`; `stillroom calibrate --quality` finds the smallest that is good enough."""
    focus_window: AtLeastZero = 0
    """Documents that the question does not look at, as so many layers in a row agree, are not repaired (Cache-Craft's
    Algorithm 1). 0: all are."""
    token_selector: TokenSelector = "question"
    """Which tokens those are: by the question's attention, mostly its last token's (`question`) or all alike
    (`question_mean`, as ProphetKV); those that had looked most at earlier documents when their KV was computed
    (`context`, Cache-Craft's) or were most looked at (`received`, H2O); those whose values differ most in an early
    layer (`deviation`, CacheBlend); the first of each document (`first`, EPIC), or any (`random`). All but the first
    are for comparison."""
    audit_share: Share = 0.02
    """With `anywhere`: share of such answers that is compared with a full prefill, when nobody waits. 0: none."""
    max_disagreement: Share = 0.25
    """Share of audited answers whose first tokens may differ. When surely more do, the recompute ratio is doubled, and
    in the end only exact prefixes are reused. When surely less than half of it do, the ratio comes down again."""
    host_bytes: AtLeastZero = 2 * 1024**3
    """Host memory for KV that had to leave the device (`runtime.kv_bytes`); taken as it fills. 0: none."""
    disk_bytes: AtLeastZero = 4 * 1024**3
    """Disk for KV, in the folder `kv` of the knowledge base; it survives restarts. Counts whole files, with their
    headers of 4 KiB and what the last block leaves empty. What other models have left there takes at most half of it.
    0: none."""
    prefetch_bytes: AtLeastZero = 256 * 1024**2
    """Host memory into which KV is read from disk while the question that will use it waits. 0: none."""
    preload: Preload = "off"
    """`layers`: on a CPU, kept KV is copied to its place layer by layer, by another thread, while earlier layers
    compute. `off`: all of it before they do (docs/chunk-reuse.md)."""
    policy: EvictionPolicy = "prefix_heat"
    """Who leaves a full tier: by our own rule, by RAGCache's `pgdsf`, or by one of its baselines. Measured beside each
    other in docs/policies-bench.md."""
    window_s: AboveZero = 3600.0
    """How far back uses of a document count for `pgdsf`, `gdsf` and `lfu`, in seconds."""
    looks_ahead: bool = True
    """What waiting requests will use leaves last."""
    admits_by_frequency: bool = False
    """A full disk keeps what is asked for more often than what comes: fewer writes, and fewer hits."""
    load: LoadChoice = "measured"
    """`measured`: KV on host or disk is loaded where that is faster than computing it, by the cost profile
    (`stillroom calibrate`). `always`: whenever it is there."""
    tail_blocks: int = 4
    """The end of a prompt is kept in pieces of this many blocks, so that long ones (conversations, raw prompts) are
    shared as far as they agree. Questions shorter than a piece are not kept."""

    @property
    def keeps_kv(self) -> bool:
        """Whether KV is kept for later prompts at all."""
        return self.mode != "off"

    @property
    def allows_any_position(self) -> bool:
        """Whether kept KV may be reused at another position than its own."""
        return self.mode == "anywhere"

    def __post_init__(self) -> None:
        check_ranges("reuse", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Beginning to read the likely documents while the search goes on (docs/pipelining.md)."""

    mode: Speculation = "auto"
    """`auto`: where it is measured to pay. `on`: every search runs in stages. No token depends on it."""
    num_stages: int = 4
    """Lists that a search gives, the last one included."""
    max_prefill_batch: int = 1
    """It is begun only while fewer prompts than this wait or are read. A GPU has room for more than one."""
