"""Settings of the local runtime: decoder and step loop, KV reuse, speculation.

Users import them from `config.settings`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from stillroom.config.quantities import AboveZero, AtLeastZero, OneOf, Range, Share, check_ranges
from stillroom.config.retrieval_settings import Dtype
from stillroom.config.tier_address import parse_tier_address

BUNDLED_MODEL = "bundled"
"""Model name of the default bundled model, which is the reader."""

ReuseMode = Literal["exact", "anywhere", "prepared", "off"]
TokenSelector = Literal["question", "question_mean", "context", "received", "deviation", "first", "random"]
RecomputeBudget = Literal["ratio", "cfo"]
SchedulingPolicy = Literal["first_come", "cache_first", "shortest_first"]
EvictionPolicy = Literal["prefix_heat", "pgdsf", "gdsf", "lru", "lfu", "tamm", "reusability"]
LoadChoice = Literal["measured", "always"]
PrepareWhen = Literal["auto", "on", "off"]
Speculation = Literal["auto", "on", "off"]
Preload = Literal["off", "layers"]
Weights = Literal["checkpoint", "int8", "w8a8", "int4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """The decoder and its step loop."""

    model: str = BUNDLED_MODEL
    """`bundled`: the bundled reader, which quotes documents and generates no text (docs/reader.md).
    `bundled:microworld`: a tiny decoder of an invented country, to show reuse of KV. Else a folder with a Hugging Face
    checkpoint, a GGUF file, or a hub name (docs/models.md)."""
    device: str = "auto"
    """`auto`: cuda if there is a GPU, else cpu; or any torch device name."""
    dtype: Dtype = "auto"
    """`auto`: the checkpoint's own; of the reader bfloat16 if the processor multiplies it, else float32."""
    weights: Weights = "checkpoint"
    """`int8`: rounds weights to 8 bits while loading; half the memory of bfloat16 and faster decoding on a CPU; answers
    may differ (docs/runtime-bench.md). `w8a8`: also rounds the inputs of prompts' products, each token with its own
    scale; faster prefill. `int4`: rounds all but the last matrix to 4 bits; answers differ more often. `checkpoint`: as
    stored."""
    max_model_len: AtLeastZero = 0
    """Most tokens of a prompt with its answer. 0: the model's limit; for a longrope model (Phi-3 128k) the length of
    its first training, because greater lengths need other rotary frequencies for every prompt."""
    block_size: int = 16
    """Tokens per KV block. Larger blocks give shorter block tables and coarser sharing."""
    kv_bytes: int = 2 * 1024**3
    """Memory for KV blocks on the device, of running requests and kept KV. On a CPU, pages that were never written cost
    nothing."""
    num_threads: Annotated[int, Range(0, 1024)] = 0
    """CPU threads for computing. 0: the fastest number, measured when the model is loaded; of a decoder it falls while
    other processes use the cores, and rises again (docs/runtime.md). `OMP_NUM_THREADS` fixes the number too."""
    max_num_seqs: int = 32
    """Most requests that run at the same time; others wait."""
    scheduling: SchedulingPolicy = "first_come"
    """Admission order. `first_come`: by arrival. `cache_first`: highest ratio of cached to remaining tokens first
    (RAGCache 5.2). `shortest_first`: fewest tokens to compute first. Tenants that were served less come first, and
    within a tenant requests of higher priority (a lower number)."""
    starvation_window: AtLeastZero = 32
    """Later requests that may be admitted before a waiting one."""
    max_waiting: AtLeastZero = 1024
    """Most waiting requests; further ones are refused (HTTP 429). 0: no limit."""
    batch_delay_ms: float = 0.0
    """Milliseconds that the first request of an idle engine waits for others, until the step's tokens or sequences are
    full. 0: no wait."""
    max_num_batched_tokens: int = 512
    """Token budget of one step. Larger budgets give faster prefill and longer gaps between tokens of running
    requests."""
    prompt_lookup: AtLeastZero = 0
    """Most tokens that prompt lookup proposes per step and answer: the continuation of the answer's last tokens where
    they occur earlier in it or in its prompt. A step that computes several right ones saves time; the number follows
    the measured gain (docs/runtime.md). 0: none."""
    fixed_shapes: bool = False
    """Compute each piece of a prompt (system prompt, document, 64 tokens of the question) in its own step. Exact reuse
    is then bit-identical in bfloat16 too, while one request runs at a time. Slower: small documents do not fill a step,
    and prompts are not computed together (docs/knowledge-tree.md)."""
    request_timeout_s: float = 600.0
    """Seconds that a request may take. A slower request is restarted once, with its tokens and kept KV, and fails after
    the same time again. 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseConfig:
    """Reuse of KV across prompts (docs/knowledge-tree.md)."""

    mode: ReuseMode = "exact"
    """`exact`: reuses KV of equal prefixes. In float32 no token changes; in bfloat16 near ties can (4 of 200 answers),
    unless `runtime.fixed_shapes` is on. `anywhere`: also reuses a document's KV at other positions and recomputes a
    share of its tokens; answers may change (docs/chunk-reuse.md). `prepared`: also reuses documents' KV that was
    computed in advance behind the chunks before it in its document; answers may change (docs/prepared.md). `off`:
    computes every prompt."""
    recompute_ratio: Share = 0.15
    """With `anywhere`: share of the tokens of documents reused at another position that is recomputed, in [0, 1]. More
    is slower and closer to a full prefill; 1 is a full prefill."""
    recompute_budget: RecomputeBudget = "ratio"
    """`ratio`: the share `recompute_ratio`. `cfo`: a share per document, by its dependence on the documents before it
    and how few of them precede it again (Cache-Craft's CFO), times `alpha`."""
    alpha: float = 1.0
    """Factor on the shares of `cfo`; `stillroom calibrate --quality` finds the smallest that suffices."""
    focus_window: AtLeastZero = 0
    """Documents that the question does not attend to, in this many consecutive layers, are not recomputed
    (after Cache-Craft's Algorithm 1, which recomputes them in the first layers). Fewer answers equal a full prefill's;
    measure yours. 0: all are recomputed."""
    token_selector: TokenSelector = "question"
    """Tokens to recompute. `question`: most attended by the question, mostly by its last token. `question_mean`: by all
    its tokens equally (ProphetKV). `context`: most attention to earlier documents when computed (Cache-Craft).
    `received`: most attended (H2O). `deviation`: values differ most in an early layer (CacheBlend). `first`: first of
    each document (EPIC). `random`. All but `question` are for comparison."""
    audit_share: Share = 0.02
    """With `anywhere` and `prepared`: share of such answers that is compared with a full prefill while the engine is
    idle: of its prompt and, with `prepared`, of its documents. 0: none."""
    max_disagreement: Share = 0.25
    """Share of audited answers whose first tokens may differ from every full prefill. If more differ with confidence,
    the recompute ratio is doubled, and in the end only exact prefixes are reused; with `prepared` at once. If fewer
    than half of it do, that is taken back."""
    host_bytes: AtLeastZero = 2 * 1024**3
    """Host memory for KV evicted from the device (`runtime.kv_bytes`); allocated as it fills. 0: none."""
    disk_bytes: AtLeastZero = 4 * 1024**3
    """Disk for KV, in the folder `kv` of the knowledge base; survives restarts. Counts whole files with their headers
    of 4 KiB and the empty part of the last block. KV of other models takes at most half of it. 0: none."""
    disk_writers: Annotated[int, Range(0, 64)] = 0
    """Most processes that keep KV on disk for the same knowledge base and model at the same time, each in a folder of
    its own with `disk_bytes`; further ones only read what the first one has stored. 0: 16 for `stillroom engine`, else
    1."""
    prefetch_bytes: AtLeastZero = 256 * 1024**2
    """Host memory for KV prefetched from disk for waiting questions. 0: none."""
    kv_tier: str = ""
    """Place of KV that several processes share: `valkey://host:6379`, `rediss://user:password@host/0` (with TLS), or
    `file:///shared/folder` (docs/kv-tier.md). Empty: none."""
    kv_tier_key: str = field(default="", repr=False)
    """Secret that signs the records of a tier that others can write to. Read from the environment only, never from
    files or flags. Empty: records have checksums only."""
    kv_tier_bytes: AtLeastZero = 16 * 1024**3
    """Size of a shared folder; the oldest records are removed. A server has a limit of its own."""
    kv_tier_ttl_s: AboveZero = 604800.0
    """Seconds until a record in the tier is dropped."""
    kv_tier_timeout_s: AboveZero = 1.0
    """Seconds that the tier may take to connect, and to send the next bytes."""
    preload: Preload = "off"
    """`layers`: on a CPU, another thread copies kept KV layer by layer while earlier layers compute. `off`: all of it
    is copied first (docs/chunk-reuse.md)."""
    policy: EvictionPolicy = "prefix_heat"
    """Eviction order of a full tier: Stillroom's `prefix_heat`, RAGCache's `pgdsf`, or a baseline
    (docs/policies-bench.md)."""
    window_s: AboveZero = 3600.0
    """Seconds for which uses of a document count in `pgdsf`, `gdsf` and `lfu`."""
    looks_ahead: bool = True
    """Evict KV that waiting requests will use last."""
    admits_by_frequency: bool = False
    """A full disk takes new KV only if it is used more often than the KV it would evict: fewer writes and fewer
    hits."""
    load: LoadChoice = "measured"
    """`measured`: loads KV from host or disk if that is faster than computing it, by the cost profile (`stillroom
    calibrate`). `always`: loads it whenever it exists."""
    tail_blocks: int = 4
    """Blocks per kept piece of the end of a prompt, so that long ends (conversations, raw prompts) are shared as far as
    they are equal. Ends shorter than a piece are not kept."""

    @property
    def keeps_kv(self) -> bool:
        """Whether KV is kept for later prompts at all."""
        return self.mode != "off"

    @property
    def allows_any_position(self) -> bool:
        """Whether kept KV may be reused at another position than its own."""
        return self.mode in ("anywhere", "prepared")

    def __post_init__(self) -> None:
        check_ranges("reuse", self)
        if self.kv_tier:
            parse_tier_address("reuse.kv_tier", self.kv_tier)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """Computing documents' KV before a question asks for it (docs/prepared.md)."""

    when_idle: PrepareWhen = "auto"
    """Whether a server prepares documents while it answers no question. `auto`: with `reuse.mode = "prepared"`. `on`:
    with `exact` too. `off`: only `stillroom prepare` does."""
    idle_s: float = 0.2
    """Seconds without a question before preparing goes on."""
    layer_ms: AboveZero = 5.0
    """Longest time of a layer of a preparing step, by the cost profile. A question that arrives waits for the end of
    the layer that is computed."""
    window_tokens: AtLeastZero = 0
    """Most tokens of a document that are computed together; longer documents are cut into windows. 0: as many as the
    model takes, at most 4096."""
    overlap: Share = 0.25
    """Share of a window that the next one computes again, so that its first chunks have context too."""
    bits: Annotated[int, OneOf((4, 8, 16))] = 8
    """Bits of each number of prepared KV on host and disk, with `reuse.mode = "prepared"`: 16 (as it was computed, in
    the model's type), 8 or 4. KV kept with fewer bits is computed again; KV kept with more is used as it is (`stillroom
    cache clear` makes room)."""
    host_bytes: AtLeastZero = 1024**3
    """Part of `reuse.host_bytes` that prepared KV may take."""
    disk_bytes: AtLeastZero = 2 * 1024**3
    """Part of `reuse.disk_bytes` that prepared KV may take. Preparing stops when it is full."""

    def __post_init__(self) -> None:
        check_ranges("prepare", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Speculative prefill of likely documents during the search (docs/pipelining.md)."""

    mode: Speculation = "auto"
    """`auto`: when measurements show a gain. `on`: every search runs in stages. Changes no token."""
    num_stages: int = 4
    """Stages of a search, the last one included."""
    max_prefill_batch: int = 1
    """Speculate only while fewer prompts than this wait or prefill. A GPU can take more than one."""
