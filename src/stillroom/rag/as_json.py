"""A search, an answer, a source and a document as JSON objects, for the command line and for HTTP.

Imports no FastAPI, pydantic or torch, so that the command line starts fast.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stillroom.config.settings import SearchMode
from stillroom.core.document import Chunk, DocumentInfo, Paragraph, ScoredChunk, SearchResult
from stillroom.core.document_content import DocumentContent
from stillroom.core.ids import format_chunk_id

if TYPE_CHECKING:  # the command line prints --help without importing the engine
    from stillroom.rag.answer import Answer, Source

JsonObject = dict[str, Any]


def search_as_json(
    query: str,
    mode: SearchMode,
    found: SearchResult,
    total_seconds: float,
    shown_id: Callable[[str], str] = lambda document_id: document_id,
) -> JsonObject:
    """A search: its results, best first, and its timing.

    Args:
        shown_id: document id -> the id to show, such as `core.ids.public_id`.
    """
    return {
        "query": query,
        "mode": mode,
        "num_reranked": found.num_reranked,
        "results": [_hit(scored, shown_id) for scored in found.results],
        "timing": {
            "embed_seconds": found.embed_seconds,
            "search_seconds": found.search_seconds,
            "rerank_seconds": found.rerank_seconds,
            "total_seconds": total_seconds,
        },
    }


def _hit(scored: ScoredChunk, shown_id: Callable[[str], str]) -> JsonObject:
    return {
        "document": shown_id(scored.chunk.document_id),
        "chunk_id": format_chunk_id(scored.chunk.chunk_id),
        "text": scored.chunk.text,
        "score": scored.score,
        "scores": dict(scored.scores),
        **place_as_json(scored.chunk),
        "also_in": [
            {"document": shown_id(copy.document_id), "chunk_id": format_chunk_id(copy.chunk_id), **place_as_json(copy)}
            for copy in scored.copies
        ],
    }


def place_as_json(chunk: Chunk) -> JsonObject:
    """A chunk's place in its document: heading, lines and pages."""
    return {
        "heading": chunk.heading,
        "start_line": chunk.start_line,
        "end_line": chunk.end_line,
        "start_page": chunk.start_page,
        "end_page": chunk.end_page,
    }


def source_as_json(source: "Source") -> JsonObject:
    """A chunk of the prompt; the keys are the fields of `rag.answer.Source`."""
    return dataclasses.asdict(source)


def answer_as_json(question: str, answer: "Answer") -> JsonObject:
    """A question and its finished answer; `logprobs` only where the request asked for them."""
    scores = {} if answer.logprobs is None else {"logprobs": [dataclasses.asdict(score) for score in answer.logprobs]}
    return {
        "question": question,
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "request_id": answer.request_id,
        "sources": [source_as_json(source) for source in answer.sources],
        **details_as_json(answer),
        "num_generated_tokens": answer.num_generated_tokens,
        **scores,
    }


def details_as_json(answer: "Answer") -> JsonObject:
    """What an answer reports beside its text: the same for the command line, HTTP replies and streams.

    A field that is added here also goes into `AnswerDetails` and `StreamDetails` (server/schemas/replies.py).
    """
    return {
        "highlight": None if answer.highlight is None else list(answer.highlight),
        "confidence": answer.confidence,
        "warnings": list(answer.warnings),
        "timing": dataclasses.asdict(answer.timing),
        "reuse": dataclasses.asdict(answer.reuse),
        "speculation": dataclasses.asdict(answer.speculation),
        "lookup": dataclasses.asdict(answer.lookup),
        "citations": [dataclasses.asdict(citation) for citation in answer.citations],
        "hops": [dataclasses.asdict(hop) for hop in answer.hops],
        "route": None if answer.route is None else dataclasses.asdict(answer.route),
    }


def content_as_json(
    content: DocumentContent,
    paragraphs: Sequence[Paragraph],
    shown_id: Callable[[str], str] = lambda document_id: document_id,
) -> JsonObject:
    """The text of a document, or the paragraphs of a part of it. `shown_id` as for `search_as_json`."""
    return {
        "document": shown_id(content.document_id),
        "title": content.title,
        "source": content.source,
        "notice": content.notice,
        "num_lines": content.num_lines,
        "num_pages": content.num_pages,
        "has_file": content.has_file,
        "has_page_images": content.has_page_images,
        "paragraphs": [dataclasses.asdict(paragraph) for paragraph in paragraphs],
    }


def document_as_json(info: DocumentInfo) -> JsonObject:
    """A document in a list, under the id that the knowledge base has for it."""
    return {"document": info.document_id, **document_fields(info)}


def document_fields(info: DocumentInfo) -> JsonObject:
    """Fields of a document beside its id."""
    return {
        "title": info.title,
        "num_chunks": info.num_chunks,
        "num_bytes": info.num_bytes,
        "added_at": info.added_at,
        "metadata": dict(info.metadata),
    }
