"""Uploads and files of `FakeStillroom`."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stillroom.core.document import DocumentInfo
from stillroom.errors import OriginalGoneError, UnknownDocumentError

if TYPE_CHECKING:
    from stillroom.retrieval.ingest import AddProgress
    from stillroom.retrieval.originals import OriginalFile
    from stillroom.retrieval.uploads import UploadResult
    from tests.server.fakes import FakeStillroom


class FakeUploads:
    """Uploads, kept as texts under names that begin with `uploads/`."""

    def __init__(self, stillroom: "FakeStillroom") -> None:
        self._stillroom = stillroom

    def add(self, name: str, content: bytes, progress: "Callable[[AddProgress], None] | None") -> "UploadResult":
        from stillroom.retrieval.ingest import AddProgress
        from stillroom.retrieval.uploads import UploadResult

        if progress is not None:
            progress(AddProgress(1, 1, len(content), len(content), 1, name))
        if b"\0" in content:
            return UploadResult(name, "failed", reason=f"{name}: binary data, not text")
        document_id, text = f"uploads/{name}", content.decode(errors="replace")
        known = self._stillroom.texts.get(document_id)
        self._stillroom.texts[document_id] = text
        outcome: Any = "added" if known is None else "unchanged" if known == text else "updated"
        return UploadResult(name, outcome, tuple(self.find(name)))

    def find(self, name: str) -> list[DocumentInfo]:
        return [info for info in self._stillroom.documents() if info.document_id in (name, f"uploads/{name}")]

    find_any = find

    def one(self, name: str) -> DocumentInfo:
        found = self.find(name)
        if not found:
            raise UnknownDocumentError(f"there is no document {name!r}")
        return found[0]

    def name_of(self, document_id: str) -> str | None:
        return document_id.removeprefix("uploads/") if document_id.startswith("uploads/") else None


class FakeOriginals:
    """No document has a file."""

    def __init__(self, stillroom: "FakeStillroom") -> None:
        self.content = stillroom.document_content

    def file(self, document_id: str) -> "contextlib.AbstractContextManager[OriginalFile]":
        raise OriginalGoneError("the file is no longer there")
