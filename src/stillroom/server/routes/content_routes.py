"""`/v1/documents/{document}/content` and `/pages/{page}.png`: open a document to read it.

The text comes from the file while it holds what was indexed, else from the index (`retrieval/originals.py`). Files and
pictures are sent with headers that keep a browser from running anything in them.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import urlencode

from fastapi import APIRouter, Path, Query, Request
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from stillroom.core.cancellation import Cancellation
from stillroom.core.document import Paragraph
from stillroom.core.document_content import DocumentContent, Span
from stillroom.core.ids import DocumentId, public_id
from stillroom.errors import UnknownDocumentError
from stillroom.rag.as_json import content_as_json
from stillroom.retrieval.intake.page_images import MAX_WIDTH, MIN_WIDTH
from stillroom.server.auth.tenants import stillroom_of
from stillroom.server.limits.workers import Workers
from stillroom.server.privacy import without_folders
from stillroom.server.routes.content_page import SECURITY_HEADERS, content_page
from stillroom.server.routes.document_replies import document_json
from stillroom.server.schemas.documents import DocumentText
from stillroom.server.schemas.requests import ContentQuery

if TYPE_CHECKING:
    from stillroom.rag.stillroom import Stillroom

T = TypeVar("T")

_CHUNKS_OF_A_PAGE = 100
_RANGE = re.compile(r"bytes=([0-9]{1,18})?-([0-9]{1,18})?")
_HTML = "text/html; charset=utf-8"
_CACHED = {"Cache-Control": "private, no-cache", "Vary": "Accept, Authorization"}
_TEXT: dict[str, Any] = {"schema": {"type": "string"}}
_BYTES: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
_NOT_MODIFIED: dict[int | str, dict[str, Any]] = {
    304: {"description": "The client has this version (`If-None-Match`).", "content": {"text/plain": {}}}
}
_CONTENT_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/html": _TEXT, "application/octet-stream": _BYTES}},
    206: {"description": "A part of the file.", "content": {"application/octet-stream": _BYTES}},
    **_NOT_MODIFIED,
}
_IMAGE_RESPONSES: dict[int | str, dict[str, Any]] = {200: {"content": {"image/png": _BYTES}}, **_NOT_MODIFIED}

_DocumentPath = Annotated[str, Path(description="The id, or the name of an uploaded file.", min_length=1)]


class ContentRoutes:
    """Functions of the routes."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def router(self) -> APIRouter:
        router = APIRouter(tags=["documents"])
        content, image = "/v1/documents/{document:path}/content", "/v1/documents/{document:path}/pages/{page}.png"
        router.add_api_route(
            content, self.content, methods=["GET"], response_model=DocumentText, responses=_CONTENT_RESPONSES
        )
        router.add_api_route(
            image, self.page_image, methods=["GET"], response_class=Response, responses=_IMAGE_RESPONSES
        )
        router.add_api_route(content, self.content, methods=["HEAD"], include_in_schema=False, response_model=None)
        router.add_api_route(image, self.page_image, methods=["HEAD"], include_in_schema=False, response_model=None)
        return router

    async def content(
        self, document: _DocumentPath, query: Annotated[ContentQuery, Query()], request: Request
    ) -> Response:
        """Return the text of a document, as JSON or as an HTML page with anchors for lines and pages; or its original
        file."""
        stillroom = stillroom_of(request)
        try:
            document_id = await self._run(_id_of, stillroom, document)
        except UnknownDocumentError:  # it may be the end of another document's name
            return await self._described(stillroom, f"{document}/content", document)
        if query.download == "1":
            return await self._run(_download, stillroom, document_id, request)
        stop = Cancellation()
        found = await self._run(stillroom.originals.content, document_id, stop, stop=stop)
        is_html = _wants_html(query, request.headers.get("accept", ""))
        render = _as_html if is_html else _as_json
        text = await self._run(render, found, query)
        headers = {**_CACHED, **(SECURITY_HEADERS if is_html else {})}
        return _respond(request, text.encode(), _HTML if is_html else "application/json", headers)

    async def page_image(
        self,
        document: _DocumentPath,
        page: Annotated[int, Path(ge=1, lt=2**31, description="Page, from 1.")],
        request: Request,
        width: Annotated[int, Query(ge=MIN_WIDTH, le=MAX_WIDTH, description="Pixels.")] = 1000,
    ) -> Response:
        """Return a page of a PDF as a picture."""
        stillroom = stillroom_of(request)
        try:
            document_id = await self._run(_id_of, stillroom, document)
        except UnknownDocumentError:
            return await self._described(stillroom, f"{document}/pages/{page}.png", document)
        headers = {**_CACHED, **SECURITY_HEADERS}
        sha256 = await self._run(_sha256_of, stillroom, document_id)
        etag = f'"{sha256[:32]}-{page}-{width}"'
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers={**headers, "ETag": etag})
        stop = Cancellation()
        png = await self._run(stillroom.originals.page_image, document_id, page, width, stop, stop=stop)
        return Response(png, media_type="image/png", headers={**headers, "ETag": etag})

    async def _described(self, stillroom: "Stillroom", document: str, shorter: str) -> Response:
        """Describe a document whose name ends as one of these routes, else report that `shorter` does not exist."""
        try:
            content = await self._run(document_json, stillroom, document, _CHUNKS_OF_A_PAGE, 0)
        except UnknownDocumentError:
            raise UnknownDocumentError(
                f"there is no document {shorter!r}; GET /v1/documents lists the documents"
            ) from None
        return Response(content, media_type="application/json")

    async def _run(self, call: Callable[..., T], *args: Any, stop: Cancellation | None = None) -> T:
        """Return the result of a call in a thread for documents. `stop` is cancelled when the server stops or the
        caller is cancelled."""
        stop = stop or Cancellation()
        self._workers.changes.add(stop)
        try:
            return await self._workers.run(self._workers.documents, call, *args)
        finally:
            stop.cancel()
            self._workers.changes.discard(stop)


def _id_of(stillroom: "Stillroom", document: str) -> DocumentId:
    """Return the id of an indexed document. Raises UnknownDocumentError or SeveralDocumentsError."""
    found = stillroom.uploads.one(document)
    if not found.is_indexed:
        raise UnknownDocumentError(f"{document!r} is not indexed; upload it again, or delete it")
    return found.document_id


def _sha256_of(stillroom: "Stillroom", document_id: DocumentId) -> str:
    with stillroom.originals.file(document_id) as file:
        return file.sha256


def _wants_html(query: ContentQuery, accept: str) -> bool:
    if query.format is not None:
        return query.format == "html"
    return "text/html" in accept and "application/json" not in accept


def _respond(request: Request, content: bytes, media_type: str, headers: dict[str, str]) -> Response:
    """Return the content, or 304 if the client has it."""
    headers = {**headers, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=media_type, headers=headers)


# Text


def _part(content: DocumentContent, query: ContentQuery) -> tuple[tuple[Paragraph, ...], tuple[Paragraph, ...]]:
    """Return the paragraphs of the lines and pages that were asked for, and those of this reply."""
    found = content.part(Span(query.start_line, query.end_line), Span(query.page, query.page))
    return found, found[query.offset : query.offset + query.limit]


def _as_json(content: DocumentContent, query: ContentQuery) -> str:
    found, shown = _part(content, query)
    content = dataclasses.replace(content, notice=without_folders(content.notice))
    counts = {"num_paragraphs": len(found), "has_more": query.offset + len(shown) < len(found)}
    return json.dumps({"object": "document.content", **content_as_json(content, shown, public_id), **counts})


def _as_html(content: DocumentContent, query: ContentQuery) -> str:
    found, shown = _part(content, query)
    content = dataclasses.replace(content, notice=without_folders(content.notice))
    first, _, last = query.highlight.replace("L", "").partition("-")
    highlight = Span(int(first or 0), int(last or first or 0))
    next_part = ""
    if query.offset + len(shown) < len(found):
        asked = query.model_dump(exclude_defaults=True) | {"offset": query.offset + len(shown), "format": "html"}
        next_part = f"?{urlencode(asked)}"
    return content_page(content, shown, highlight, next_part)


# Original files


def _download(stillroom: "Stillroom", document_id: DocumentId, request: Request) -> Response:
    """Raises OriginalGoneError."""
    with contextlib.ExitStack() as held:
        file = held.enter_context(stillroom.originals.file(document_id))
        headers = {"ETag": f'"{file.sha256[:32]}"', **_CACHED, **SECURITY_HEADERS}
        headers["Content-Security-Policy"] = "sandbox; default-src 'none'"
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return _OpenFileResponse(
            # the open file, not its path, which may lead elsewhere by now
            f"/dev/fd/{file.stream.fileno()}",
            held=held.pop_all(),
            headers=headers,
            media_type="application/octet-stream",
            filename=file.name,
            stat_result=file.status,
        )


class _OpenFileResponse(FileResponse):
    """Sends an open file, or ranges of it, and closes it."""

    def __init__(self, path: str, *, held: contextlib.ExitStack, stat_result: os.stat_result, **options: Any) -> None:
        super().__init__(path, stat_result=stat_result, **options)
        self._held = held
        self._num_bytes = stat_result.st_size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_range(Headers(scope=scope).get("range", ""), self._num_bytes):  # servers may ignore a range
            scope = {**scope, "headers": [header for header in scope["headers"] if header[0] != b"range"]}
        try:
            await super().__call__(scope, receive, send)
        except OSError as error:
            if error.errno is not None:
                raise
            raise ClientDisconnect from error  # uvicorn's error of a client that is gone has no number
        finally:
            self._held.close()


def _is_range(header: str, num_bytes: int) -> bool:
    """Return whether a `Range` header names one part that a file of this size has."""
    match = _RANGE.fullmatch(header.strip())
    if match is None:
        return False
    first, last = (int(number) if number else None for number in match.groups())
    if first is None:
        return bool(last) and num_bytes > 0
    return first < num_bytes and (last is None or first <= last)
