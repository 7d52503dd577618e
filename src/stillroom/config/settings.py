"""All settings: the sections, defined in modules of their own, and `StillroomConfig`, which holds them.

A field's docstring gives unit and consequence; `config.load` fills the fields. Values found at start-up (number of
blocks, embedding dimension) are never written back.
"""

from dataclasses import dataclass, field

from stillroom.config.cluster_settings import ClusterConfig
from stillroom.config.documents_settings import DocumentsConfig
from stillroom.config.generation_settings import (
    ChunkOrder,
    DocumentOrder,
    EngineConfig,
    EngineKind,
    EnginePrompt,
    GenerationConfig,
    TraceConfig,
)
from stillroom.config.retrieval_settings import (
    ChunkerConfig,
    Dtype,
    EmbedderConfig,
    FusionName,
    HopQuestion,
    IndexConfig,
    IndexKind,
    PgvectorConfig,
    QdrantConfig,
    QueryCacheConfig,
    SearchConfig,
    SearchMode,
)
from stillroom.config.runtime_settings import (
    BUNDLED_MODEL,
    EvictionPolicy,
    LoadChoice,
    Preload,
    PrepareConfig,
    PrepareWhen,
    RecomputeBudget,
    ReuseConfig,
    ReuseMode,
    RuntimeConfig,
    SchedulingPolicy,
    Speculation,
    SpeculationConfig,
    TokenSelector,
    Weights,
)
from stillroom.config.server_settings import ServerConfig
from stillroom.errors import ConfigError

__all__ = [
    "BUNDLED_MODEL",
    "ChunkOrder",
    "ChunkerConfig",
    "ClusterConfig",
    "DocumentOrder",
    "DocumentsConfig",
    "Dtype",
    "EmbedderConfig",
    "EngineConfig",
    "EngineKind",
    "EnginePrompt",
    "EvictionPolicy",
    "FusionName",
    "GenerationConfig",
    "HopQuestion",
    "IndexConfig",
    "IndexKind",
    "LoadChoice",
    "PgvectorConfig",
    "Preload",
    "PrepareConfig",
    "PrepareWhen",
    "QdrantConfig",
    "QueryCacheConfig",
    "RecomputeBudget",
    "ReuseConfig",
    "ReuseMode",
    "RuntimeConfig",
    "SchedulingPolicy",
    "SearchConfig",
    "SearchMode",
    "ServerConfig",
    "Speculation",
    "SpeculationConfig",
    "StillroomConfig",
    "TokenSelector",
    "TraceConfig",
    "Weights",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StillroomConfig:
    """All settings, by section. A section is a table of the same name in `stillroom.toml`."""

    documents: DocumentsConfig = field(default_factory=DocumentsConfig)
    chunker: ChunkerConfig = field(default_factory=ChunkerConfig)
    embedder: EmbedderConfig = field(default_factory=EmbedderConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    qdrant: QdrantConfig = field(default_factory=QdrantConfig)
    pgvector: PgvectorConfig = field(default_factory=PgvectorConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    query_cache: QueryCacheConfig = field(default_factory=QueryCacheConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    reuse: ReuseConfig = field(default_factory=ReuseConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        if self.index.kind == "qdrant" and not self.qdrant.url:
            raise ConfigError(
                "index.kind = 'qdrant' needs qdrant.url: a server's address such as http://127.0.0.1:6333, "
                "or 'embedded'"
            )
        if self.generation.max_prompt_tokens and self.engine.kind == "openai" and self.engine.prompt != "tokens":
            raise ConfigError(
                "generation.max_prompt_tokens needs engine.prompt = 'tokens' with a remote engine: otherwise "
                "only the remote server counts tokens; set its own limit instead"
            )
