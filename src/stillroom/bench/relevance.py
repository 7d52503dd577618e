"""How often a search finds what people judged relevant: Recall@k on a data set in BEIR layout.

The unit is the document, as in the judgements: chunks are mapped to the records they come from, in order, and the first
k distinct records count. A knowledge base is kept per data set content and settings, so a second run only searches.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stillroom.config.settings import SearchMode, StillroomConfig
from stillroom.core.clock import Clock, SystemClock
from stillroom.core.document import SearchResult
from stillroom.errors import DocumentError, UsageError
from stillroom.retrieval.knowledge_base import KnowledgeBase

ALL_MODES: tuple[SearchMode, ...] = ("hybrid", "dense", "sparse")

_CUTOFFS = (5, 10)
_CHUNKS_PER_DOCUMENT = 10
"""Chunks asked for per document wanted: several chunks of one document may come first."""


@dataclass(frozen=True, slots=True)
class ModeResult:
    """One search mode on one data set."""

    mode: SearchMode
    recall_at_5: float
    """Relevant documents among the first 5, as a share of all relevant ones, averaged over queries."""
    recall_at_10: float
    mean_search_seconds: float
    """Per query: embedding, both indexes, fusion and text."""
    max_search_seconds: float


@dataclass(frozen=True, slots=True)
class RetrievalReport:
    """All modes on one data set."""

    dataset: str
    num_documents: int
    num_chunks: int
    num_queries: int
    """Queries with at least one relevant document; the others are left out."""
    build_seconds: float
    """Time to build the knowledge base; next to nothing where it was there."""
    modes: tuple[ModeResult, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        return dataclasses.asdict(self)


def run_retrieval(
    dataset: Path,
    work_dir: Path,
    config: StillroomConfig,
    modes: Sequence[SearchMode] = ALL_MODES,
    *,
    clock: Clock | None = None,
) -> RetrievalReport:
    """Measure recall.

    Args:
        dataset: folder with corpus.jsonl, queries.jsonl and qrels.tsv.
        work_dir: where knowledge bases are kept between runs.

    Raises:
        UsageError: a file of the data set is missing, or no query has a relevant document.
        DocumentError: a line of it cannot be read.
    """
    clock = clock or SystemClock()
    corpus, queries, qrels = (dataset / name for name in ("corpus.jsonl", "queries.jsonl", "qrels.tsv"))
    for path in (corpus, queries, qrels):
        if not path.is_file():
            raise UsageError(f"{path} is missing; a data set has corpus.jsonl, queries.jsonl and qrels.tsv")
    relevant = _read_qrels(qrels)
    judged = [(text, relevant[query_id]) for query_id, text in _read_queries(queries) if query_id in relevant]
    if not judged:
        raise UsageError(f"no query of {queries} has a relevant document in {qrels}; do the ids agree?")
    folder = work_dir / f"{dataset.name}-{_key(corpus, config)}"
    began = clock.monotonic()
    with KnowledgeBase.open(folder, config, create=True, clock=clock) as kb:
        report = kb.add([corpus])
        if report.failures:
            raise DocumentError(report.failures[0][1])
        build_seconds = clock.monotonic() - began
        kb.search(judged[0][0])  # loads the model, which belongs to no query
        return RetrievalReport(
            dataset=dataset.name,
            num_documents=kb.num_documents,
            num_chunks=kb.num_chunks,
            num_queries=len(judged),
            build_seconds=build_seconds,
            modes=tuple(_measure(kb, judged, mode) for mode in modes),
        )


def first_documents(result: SearchResult, k: int) -> list[str]:
    """The record ids of the first k distinct documents, in order."""
    seen: dict[str, None] = {}
    for scored in result.results:
        if scored.chunk.record_id is not None:
            seen.setdefault(scored.chunk.record_id)
    return list(seen)[:k]


def recall(found: Sequence[str], relevant: frozenset[str]) -> float:
    """The share of the relevant that was found."""
    return len(relevant.intersection(found)) / len(relevant)


def _measure(kb: KnowledgeBase, judged: Sequence[tuple[str, frozenset[str]]], mode: SearchMode) -> ModeResult:
    recalls: dict[int, list[float]] = {k: [] for k in _CUTOFFS}
    seconds: list[float] = []
    for text, relevant in judged:
        result = kb.search(text, mode=mode, top_k=max(_CUTOFFS) * _CHUNKS_PER_DOCUMENT)
        seconds.append(result.embed_seconds + result.search_seconds)
        for k in _CUTOFFS:
            recalls[k].append(recall(first_documents(result, k), relevant))
    means = {k: sum(values) / len(values) for k, values in recalls.items()}
    return ModeResult(mode, means[5], means[10], sum(seconds) / len(seconds), max(seconds))


def _key(corpus: Path, config: StillroomConfig) -> str:
    """What a knowledge base depends on: the corpus' place and content, and the settings that are fixed in it."""
    fixed = (config.chunker, config.embedder.model, config.index)
    with corpus.open("rb") as stream:
        content = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashlib.sha256(f"{corpus.absolute()}\0{content}\0{fixed!r}".encode()).hexdigest()[:12]


def _read_queries(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in _lines(path):
        try:
            record: Mapping[str, Any] = json.loads(line)
            yield str(record["_id"]), str(record["text"])
        except (ValueError, KeyError, TypeError) as error:
            raise DocumentError(f"{path}:{number}: a query is a JSON object with `_id` and `text`") from error


def _read_qrels(path: Path) -> dict[str, frozenset[str]]:
    """Relevant record ids by query id; a judgement of 0 says not relevant."""
    relevant: dict[str, set[str]] = {}
    for number, line in _lines(path):
        fields = line.split("\t")
        if number == 1 and fields[-1] == "score":
            continue
        try:
            query_id, record_id, score = fields
            is_relevant = float(score) > 0
        except ValueError as error:
            raise DocumentError(f"{path}:{number}: a judgement is query-id, corpus-id and score, with tabs") from error
        if is_relevant:
            relevant.setdefault(query_id, set()).add(record_id)
    return {query_id: frozenset(record_ids) for query_id, record_ids in relevant.items()}


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line.rstrip("\n")
