"""Past questions: their records for the request log (`telemetry.trace`), read with the text of documents that still
exist."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, parse_chunk_id
from stillroom.errors import CorruptKnowledgeBaseError, UnknownRequestError
from stillroom.rag.answer import Answer, Citation
from stillroom.telemetry.trace import TraceLog


def trace_of(question: str, model: str, answer: Answer) -> dict[str, Any]:
    """The record of a question for `stillroom explain`: everything except the text of its documents."""
    sources = [asdict(source) for source in answer.sources]
    for source in sources:
        del source["text"]
    return {
        "question": question,
        "model": model,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "highlight": answer.highlight,
        "confidence": answer.confidence,
        "warnings": answer.warnings,
        "num_generated_tokens": answer.num_generated_tokens,
        "sources": sources,
        "timing": asdict(answer.timing),
        "reuse": asdict(answer.reuse),
        "speculation": asdict(answer.speculation),
        "lookup": asdict(answer.lookup),
        "citations": [_without_text(citation) for citation in answer.citations],
        "hops": [asdict(hop) for hop in answer.hops],
        "route": None if answer.route is None else asdict(answer.route),
    }


def _without_text(citation: Citation) -> dict[str, Any]:
    """Return a citation without what its source has already, or the document."""
    left_out = ("document", "chunk_id", "heading", "quote")
    return {name: value for name, value in asdict(citation).items() if name not in left_out}


@dataclass(frozen=True, slots=True)
class RecordSummary:
    """A past question in a list."""

    request_id: str
    at: float
    """Seconds since 1970, when it was answered."""
    model: str
    question: str
    """Empty if a prompt was continued without a question."""
    finish_reason: str
    num_sources: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    timing: dict[str, float | None]
    """The fields of `rag.answer.Timing`."""


class Records:
    """Past questions of one knowledge base. Thread-safe."""

    def __init__(self, log: TraceLog, chunks: Callable[[Sequence[ChunkId]], dict[ChunkId, Chunk]]) -> None:
        """
        Args:
            chunks: chunk ids -> the chunks among them that still exist.
        """
        self._log = log
        self._chunks = chunks

    def stop(self) -> None:
        """Record no more questions; recorded ones stay."""
        self._log.close()

    def recent(self, limit: int = 50) -> list[RecordSummary]:
        """The last questions, latest first.

        Raises:
            KnowledgeBaseBusyError, StorageError: the request log cannot be read now.
            CorruptKnowledgeBaseError: it is damaged.
        """
        with _damage_reported():
            return [_summary(*found) for found in self._log.recent(limit)]

    def get(self, request_id: str) -> dict[str, Any]:
        """The record of a question: what `stillroom explain --json` prints, and each source's `text`, null if the
        document has changed or is gone.

        Raises:
            UnknownRequestError: it is not in the request log.
            KnowledgeBaseBusyError, StorageError, CorruptKnowledgeBaseError: as `recent`.
        """
        with _damage_reported():
            found = self._log.get(request_id) if request_id else None
            if found is None:
                raise UnknownRequestError(
                    f"{request_id!r} is not among the questions remembered; trace.keep says how many are"
                )
            name, at, trace = found
            ids = [parse_chunk_id(source["chunk_id"]) for source in trace["sources"]]
            chunks = self._chunks(ids)
            texts = [chunks[chunk_id].text if chunk_id in chunks else None for chunk_id in ids]
            sources = [source | {"text": text} for source, text in zip(trace["sources"], texts, strict=True)]
            return {"request_id": name, "at": at, **trace, "sources": sources}


def _summary(request_id: str, at: float, trace: dict[str, Any]) -> RecordSummary:
    return RecordSummary(
        request_id=request_id,
        at=at,
        model=trace["model"],
        question=trace["question"],
        finish_reason=trace["finish_reason"],
        num_sources=len(trace["sources"]),
        num_prompt_tokens=trace["reuse"]["num_prompt_tokens"],
        num_cached_tokens=trace["reuse"]["num_cached_tokens"],
        num_generated_tokens=trace["num_generated_tokens"],
        timing=trace["timing"],
    )


@contextmanager
def _damage_reported() -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptKnowledgeBaseError(
            f"the record of past questions cannot be read ({type(error).__name__}); remove traces.sqlite from the "
            "knowledge base, it holds nothing but explanations",
            part="traces.sqlite",
        ) from None
