"""`/v1/documents`: upload, list, look at and delete what the answers are made from.

An upload is answered when its documents can be found. Whoever wants to see how far it is asks for events. Uploads and
deletions of one tenant wait for each other; one that has begun is completed, even if its client leaves or the server
stops, and holds its caller's place until then.
"""

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from stillroom.core.document import Chunk, DocumentInfo
from stillroom.core.ids import DocumentId, format_chunk_id
from stillroom.core.panics import ENDINGS
from stillroom.errors import QueueFullError, StillroomError, UnknownDocumentError
from stillroom.retrieval.ingest import AddProgress
from stillroom.retrieval.uploads import UploadResult, checked_name
from stillroom.server.answering import DONE, as_event
from stillroom.server.errors import FAILED_WITH, Refused, describe, error_body
from stillroom.server.limits import OUTLASTING
from stillroom.server.payloads import Payload
from stillroom.server.replies import (
    DocumentChunk,
    DocumentDeleted,
    DocumentList,
    DocumentObject,
    DocumentWithChunks,
    ErrorDetail,
    UploadedFile,
    UploadReply,
)
from stillroom.server.tenants import caller_of, room_of
from stillroom.server.upload_body import FORMS, read_upload, size_of
from stillroom.server.workers import Workers, shutting_down

if TYPE_CHECKING:
    from stillroom.rag.room import Stillroom

T = TypeVar("T")
logger = logging.getLogger(__name__)


MAX_PAGE = 1000
_MAX_HELD = 2
"""Uploads of the largest size that one tenant may have here at the same time, being read, waiting or being indexed."""
_MAX_CHANGES = 256
"""Uploads and deletions of one tenant that wait or are under way, those whose clients have left too."""
_RETRY_SECONDS = 5.0
UNREADABLE = "document_unreadable"

_DocumentPath = Annotated[str, Path(description="The id, or the name of an uploaded file.", min_length=1)]


class DocumentRoutes:
    """The routes' functions. Each tenant has a desk of his own."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._desks: dict[str, _Desk] = {}

    def _desk(self, request: Request) -> "_Desk":
        tenant = caller_of(request).tenant
        if tenant not in self._desks:
            self._desks[tenant] = _Desk(room_of(request), self._workers)
        return self._desks[tenant]

    def router(self) -> APIRouter:
        router = APIRouter(tags=["documents"])
        router.add_api_route(
            "/v1/documents", self.upload, methods=["POST"], response_model=UploadReply, openapi_extra=FORMS
        )
        router.add_api_route("/v1/documents", self.page, methods=["GET"], response_model=DocumentList)
        router.add_api_route(
            "/v1/documents/{document:path}", self.get, methods=["GET"], response_model=DocumentWithChunks
        )
        router.add_api_route(
            "/v1/documents/{document:path}", self.delete, methods=["DELETE"], response_model=DocumentDeleted
        )
        return router

    async def upload(self, request: Request) -> Response:
        """Add or replace documents, as files of a form or as texts in JSON. The same again changes nothing.

        With `Accept: text/event-stream` the response is a stream of events that say how far it is.
        """
        desk, arrived = self._desk(request), _Progress()
        with contextlib.ExitStack() as held:
            held.enter_context(desk.holding(size_of(request, desk.max_bytes)))
            upload = await read_upload(request)
            with contextlib.ExitStack() as read:
                read.callback(upload.close)
                for name, _ in upload.files:
                    checked_name(name)  # before a stream begins
                desk.check_room()
                read.pop_all()
            running = desk.start(lambda: desk.room.upload(upload.files, arrived.note, upload.metadata), upload.close)
            taken = held.pop_all()
        running.add_done_callback(lambda _: taken.close())
        request.scope["state"][OUTLASTING] = running
        if "text/event-stream" in request.headers.get("accept", ""):
            return StreamingResponse(
                desk.events(running, arrived, request.scope["state"]), media_type="text/event-stream"
            )
        results = await self._workers.result(running)
        reply = await asyncio.to_thread(desk.reply, results)
        return JSONResponse(reply, 422 if reply["error"] else 200)

    async def page(
        self,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="Documents on this page.")] = 100,
        after: Annotated[str, Query(description="The `last_id` of the page before.")] = "",
    ) -> DocumentList:
        """Documents by id, a page at a time."""
        desk = self._desk(request)
        found = await asyncio.to_thread(desk.room.documents, after, limit + 1)
        data = [desk.object(info) for info in found[:limit]]
        return DocumentList(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=len(found) > limit,
        )

    async def get(
        self,
        document: _DocumentPath,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="Chunks on this page.")] = 100,
        offset: Annotated[int, Query(ge=0, lt=2**31, description="Chunks before it.")] = 0,
    ) -> Response:
        """One document, with its text as it is indexed, a page of chunks at a time."""
        content = await asyncio.to_thread(self._desk(request).shown, document, limit, offset)
        return Response(content, media_type="application/json")

    async def delete(self, document: _DocumentPath, request: Request) -> DocumentDeleted:
        """Forget one document, or all of one file. An uploaded file is deleted with its last document; other files stay
        where they are."""
        desk = self._desk(request)
        desk.check_room()
        running = desk.start(lambda: desk.room.discard(document))
        request.scope["state"][OUTLASTING] = running
        report = await self._workers.result(running)
        return DocumentDeleted(id=document, num_documents=report.num_documents, num_chunks=report.num_chunks)


class _Progress:
    """Of an upload, from the thread that works on it to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.arrived: asyncio.Queue[AddProgress | None] = asyncio.Queue()
        """None is the end."""

    def note(self, progress: AddProgress | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self.arrived.put_nowait, progress)


class _Desk:
    """Where one tenant's documents are taken in and given out."""

    def __init__(self, room: "Stillroom", workers: Workers) -> None:
        self.room = room
        self._workers = workers
        self.max_bytes = room.config.server.max_upload_bytes
        self._writing = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        self._num_bytes_held = 0

    @contextlib.contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """As long as so much of an upload may be here.

        Raises:
            QueueFullError: with those that are here already it is too much.
        """
        if self._num_bytes_held + num_bytes > _MAX_HELD * self.max_bytes:
            raise self._full(f"uploads of {self._num_bytes_held} bytes are under way; send this one when they are done")
        self._num_bytes_held += num_bytes
        try:
            yield
        finally:
            self._num_bytes_held -= num_bytes

    def check_room(self) -> None:
        """Raises QueueFullError: too many changes wait already."""
        if len(self._running) >= _MAX_CHANGES:
            raise self._full(f"{len(self._running)} uploads and deletions wait already")

    def _full(self, reason: str) -> QueueFullError:
        self.room.metrics.count_refused("queue")
        return QueueFullError(reason, _RETRY_SECONDS)

    def start(self, change: Callable[[], T], release: Callable[[], None] = lambda: None) -> "asyncio.Task[T]":
        """A change in a thread, one after the other, completed whoever leaves; but it does not begin any more once the
        server stops.

        Args:
            release: called when the change has ended or will never begin.
        """
        claim = Lock()  # of the thread, or of whoever gives up before it begins

        def work() -> T:
            if not claim.acquire(blocking=False):
                raise shutting_down()
            try:
                return change()
            finally:
                release()

        def give_up(_: "asyncio.Task[T]") -> None:
            self._running.discard(task)
            if claim.acquire(blocking=False):
                release()

        async def locked() -> T:
            async with self._writing:
                if self._workers.is_stopping:
                    raise shutting_down()
                return await asyncio.get_running_loop().run_in_executor(
                    self._workers.uploads, contextvars.copy_context().run, work
                )

        task = asyncio.create_task(locked())
        self._running.add(task)
        task.add_done_callback(give_up)
        return task

    async def events(
        self, running: "asyncio.Task[list[UploadResult]]", progress: _Progress, state: dict[str, Any]
    ) -> AsyncIterator[str]:
        ended = asyncio.ensure_future(self._workers.result(running))
        ended.add_done_callback(lambda _: progress.note(None))
        while (step := await progress.arrived.get()) is not None:
            yield as_event({"object": "documents.progress", **asdict(step)})
        try:
            yield as_event(await asyncio.to_thread(self.reply, await ended))
            yield DONE
        except ENDINGS:
            raise
        except BaseException as error:
            if not isinstance(error, StillroomError):
                logger.exception("an upload failed")
            state[FAILED_WITH], body = describe(error)
            yield as_event(body)

    def shown(self, document: str, limit: int, offset: int) -> str:
        """A document with some of its chunks, as JSON.

        Raises:
            UnknownDocumentError, Refused: there is none of that name, or there are several.
        """
        found = self.room.uploads.find(document)
        if not found:
            raise UnknownDocumentError(f"there is no document {document!r}; GET /v1/documents lists what there is")
        if len(found) > 1:
            raise Refused(400, "several_documents", f"{document!r} holds {len(found)} documents; ask for one by its id")
        chunks = self.room.chunks_of(found[0].document_id, offset, limit + 1)
        page = [_chunk(chunk) for chunk in chunks[:limit]]
        whole = DocumentWithChunks(**self.object(found[0]).model_dump(), chunks=page, has_more=len(chunks) > limit)
        return whole.model_dump_json()

    def reply(self, results: Sequence[UploadResult]) -> Payload:
        data = [self._uploaded(result) for result in results]
        error = None
        if all(result.outcome == "failed" for result in results):
            message = f"no document could be read; the first: {results[0].reason}"
            error = ErrorDetail(**error_body(message, "invalid_request_error", code=UNREADABLE)["error"])
        return UploadReply(data=data, error=error).model_dump()

    def _uploaded(self, result: UploadResult) -> UploadedFile:
        error = None
        if result.outcome == "failed":
            error = ErrorDetail(**error_body(result.reason, "invalid_request_error", code=UNREADABLE)["error"])
        documents = [self.object(info) for info in result.documents]
        return UploadedFile(name=result.name, status=result.outcome, documents=documents, error=error)

    def object(self, info: DocumentInfo) -> DocumentObject:
        return DocumentObject(
            id=info.document_id,
            name=self.room.uploads.name_of(DocumentId(info.document_id)),
            title=info.title,
            num_chunks=info.num_chunks,
            num_bytes=info.num_bytes,
            added_at=info.added_at,
            metadata=dict(info.metadata),
        )


def _chunk(chunk: Chunk) -> DocumentChunk:
    return DocumentChunk(
        chunk_id=format_chunk_id(chunk.chunk_id),
        text=chunk.text,
        heading=chunk.heading,
        start_line=chunk.start_line,
        end_line=chunk.end_line,
        start_page=chunk.start_page,
        end_page=chunk.end_page,
    )
