"""The JSON objects that HTTP and the command line share: one definition, so that both print the same.

Plain dictionaries, standard library only: the command line imports this without FastAPI.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stillroom.config.settings import SearchMode
from stillroom.core.document import DocumentInfo, ScoredChunk, SearchResult
from stillroom.core.ids import format_chunk_id

if TYPE_CHECKING:  # the command line must answer --help without importing the engine
    from stillroom.rag.answer import Answer, Source

Payload = dict[str, Any]


def search_payload(
    query: str,
    mode: SearchMode,
    found: SearchResult,
    total_seconds: float,
    shown: Callable[[str], str] = lambda document_id: document_id,
) -> Payload:
    """A search: its results best first, and what it cost.

    Args:
        shown: what is shown of a document id.
    """
    return {
        "query": query,
        "mode": mode,
        "results": [_result(scored) | {"document": shown(scored.chunk.document_id)} for scored in found.results],
        "timing": {
            "embed_seconds": found.embed_seconds,
            "search_seconds": found.search_seconds,
            "total_seconds": total_seconds,
        },
    }


def _result(scored: ScoredChunk) -> Payload:
    chunk = scored.chunk
    return {
        "document": chunk.document_id,
        "chunk_id": format_chunk_id(chunk.chunk_id),
        "text": chunk.text,
        "score": scored.score,
        "scores": dict(scored.scores),
        "heading": chunk.heading,
        "start_line": chunk.start_line,
        "end_line": chunk.end_line,
        "start_page": chunk.start_page,
        "end_page": chunk.end_page,
    }


def source_payload(source: "Source") -> Payload:
    """One chunk of the prompt; the keys are the fields of `rag.answer.Source`."""
    return dataclasses.asdict(source)


def answer_payload(question: str, answer: "Answer") -> Payload:
    """A question and its finished answer."""
    scores = {} if answer.logprobs is None else {"logprobs": [dataclasses.asdict(score) for score in answer.logprobs]}
    return {
        "question": question,
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "request_id": answer.request_id,
        "sources": [source_payload(source) for source in answer.sources],
        "timing": dataclasses.asdict(answer.timing),
        "reuse": dataclasses.asdict(answer.reuse),
        "speculation": dataclasses.asdict(answer.speculation),
        "num_generated_tokens": answer.num_generated_tokens,
        **scores,
    }


def document_payload(info: DocumentInfo) -> Payload:
    """One row of the list of documents."""
    return {
        "document": info.document_id,
        "title": info.title,
        "num_chunks": info.num_chunks,
        "num_bytes": info.num_bytes,
        "added_at": info.added_at,
        "metadata": dict(info.metadata),
    }
