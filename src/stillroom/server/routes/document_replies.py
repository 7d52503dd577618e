"""Replies about documents, chunks and uploads."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stillroom.core.document import DocumentInfo
from stillroom.core.ids import DocumentId, format_chunk_id, public_id
from stillroom.rag.as_json import document_fields, place_as_json
from stillroom.retrieval.uploads import UploadResult
from stillroom.server.error_replies import error_body
from stillroom.server.privacy import without_folders
from stillroom.server.schemas.documents import (
    DocumentChunk,
    DocumentObject,
    DocumentWithChunks,
    UploadedFile,
    UploadReply,
)
from stillroom.server.schemas.replies import ErrorDetail

if TYPE_CHECKING:
    from stillroom.rag.stillroom import Stillroom

UNREADABLE = "document_unreadable"


def document_object(stillroom: "Stillroom", info: DocumentInfo) -> DocumentObject:
    return DocumentObject(
        id=public_id(info.document_id),
        status="indexed" if info.is_indexed else "not_indexed",
        name=stillroom.uploads.name_of(DocumentId(info.document_id)),
        **document_fields(info),
    )


def document_json(stillroom: "Stillroom", document: str, limit: int, offset: int) -> str:
    """Return a document with a page of its chunks, as JSON.

    Raises:
        UnknownDocumentError: no document has that id or name.
        SeveralDocumentsError: several documents have that name.
    """
    found = stillroom.uploads.one(document)
    chunks = stillroom.chunks_of(found.document_id, offset, limit + 1)
    page = [
        DocumentChunk(chunk_id=format_chunk_id(chunk.chunk_id), text=chunk.text, **place_as_json(chunk))
        for chunk in chunks[:limit]
    ]
    whole = DocumentWithChunks(
        **document_object(stillroom, found).model_dump(), chunks=page, has_more=len(chunks) > limit
    )
    return whole.model_dump_json()


def upload_reply(stillroom: "Stillroom", results: Sequence[UploadResult]) -> UploadReply:
    """Return the reply to an upload; it has an `error` if all files failed."""
    data = [_uploaded(stillroom, result) for result in results]
    error = None
    if all(result.outcome == "failed" for result in results):
        error = _unreadable(f"no document could be read; the first: {results[0].reason}")
    return UploadReply(data=data, error=error)


def _uploaded(stillroom: "Stillroom", result: UploadResult) -> UploadedFile:
    error = _unreadable(result.reason) if result.outcome == "failed" else None
    documents = [document_object(stillroom, info) for info in result.documents]
    return UploadedFile(name=result.name, status=result.outcome, documents=documents, error=error)


def _unreadable(reason: str) -> ErrorDetail:
    return ErrorDetail(**error_body(without_folders(reason), "invalid_request_error", code=UNREADABLE)["error"])
