"""`/v1/documents` and `/v1/jobs`: upload, list, read and delete documents, and follow long uploads.

An upload is answered when its documents can be searched, or after `wait` seconds with a job (HTTP 202). Uploads and
deletions of one tenant run one after the other. An upload is cancelled between two steps when its client disconnects
before it got a job, when the job is deleted, or when the server stops.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from stillroom.core.cancellation import Cancellation
from stillroom.core.clock import Clock, SystemClock
from stillroom.core.panics import ENDINGS
from stillroom.errors import ChangeCancelledError, EngineClosedError, StillroomError
from stillroom.retrieval.ingest import RemoveReport
from stillroom.retrieval.uploaded_files import checked_name
from stillroom.retrieval.uploads import UploadResult
from stillroom.server.auth.tenants import DEFAULT_TENANT, Tenants, caller_of, stillroom_of
from stillroom.server.error_replies import CLIENT_CLOSED_REQUEST, STREAM_ERROR_STATUS, describe
from stillroom.server.limits.rates import BACKGROUND_WORK
from stillroom.server.limits.workers import Workers
from stillroom.server.routes.answer_events import DONE, as_event, disconnected
from stillroom.server.routes.document_replies import document_json, document_object, upload_reply
from stillroom.server.routes.jobs import MAX_WAIT_S, Job, Jobs, UploadProgress, wait_of
from stillroom.server.routes.upload_body import FORMS, Upload, read_upload, size_of
from stillroom.server.routes.upload_queue import QueuedChange, UploadQueue
from stillroom.server.schemas.documents import (
    DocumentDeleted,
    DocumentJob,
    DocumentJobList,
    DocumentList,
    DocumentWithChunks,
    UploadReply,
)

if TYPE_CHECKING:
    from stillroom.rag.stillroom import Stillroom

logger = logging.getLogger(__name__)

MAX_PAGE = 1000

_DocumentPath = Annotated[str, Path(description="The id, or the name of an uploaded file.", min_length=1)]
_JobPath = Annotated[str, Path(description="The id of a job.", min_length=1)]
_Wait = Annotated[
    float | None,
    Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait for the result before the answer is a job (HTTP 202)."),
]


class _TenantDocuments(UploadQueue):
    """Queue and jobs of one tenant."""

    def __init__(self, stillroom: "Stillroom", workers: Workers) -> None:
        super().__init__(stillroom, workers)
        self.jobs = Jobs()


class DocumentRoutes:
    """Functions of the routes. Each tenant has its own queue and jobs."""

    def __init__(self, workers: Workers, clock: Clock | None = None) -> None:
        self._workers = workers
        self._clock = clock or SystemClock()
        self._tenants: dict[str, _TenantDocuments] = {}

    def begin(self, tenants: Tenants) -> None:
        """Complete uploads that a killed server left, and begin to change the embedder and to prepare documents if the
        settings say so: of the default tenant now, of others when they are opened.

        Called on the event loop.
        """
        loop = asyncio.get_running_loop()

        def opened(tenant: str, stillroom: "Stillroom") -> None:
            stillroom.begin_reembedding()
            begin_preparing(stillroom)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._complete, tenant, stillroom)

        tenants.on_open = opened
        tenants.default.begin_reembedding()
        begin_preparing(tenants.default)
        self._complete(DEFAULT_TENANT, tenants.default)

    def _complete(self, tenant: str, stillroom: "Stillroom") -> None:
        def ended(task: "asyncio.Task[object]") -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, (ChangeCancelledError, EngineClosedError)):
                logger.warning("interrupted uploads could not be completed: %s", error)
            elif error is None and not task.cancelled() and task.result():
                logger.info("completed %d interrupted uploads", task.result())

        self._of(tenant, stillroom).start_when_idle(stillroom.complete_uploads, ended)

    def _documents(self, request: Request) -> _TenantDocuments:
        return self._of(caller_of(request).tenant, stillroom_of(request))

    def _of(self, tenant: str, stillroom: "Stillroom") -> _TenantDocuments:
        known = self._tenants.get(tenant)
        if known is None or known.stillroom is not stillroom:  # the folder was replaced and opened again
            self._tenants[tenant] = _TenantDocuments(stillroom, self._workers)
        return self._tenants[tenant]

    def router(self) -> APIRouter:
        router = APIRouter(tags=["documents"])

        def add(method: str, path: str, reply: type, call: Any, **more: Any) -> None:
            router.add_api_route(path, call, methods=[method], response_model=reply, **more)

        accepted: dict[int | str, dict[str, Any]] = {
            202: {"model": DocumentJob, "description": "The upload continues; follow the job."}
        }
        add("POST", "/v1/documents", UploadReply, self.upload, openapi_extra=FORMS, responses=accepted)
        add("GET", "/v1/documents", DocumentList, self.page)
        add("GET", "/v1/documents/{document:path}", DocumentWithChunks, self.get)
        add("DELETE", "/v1/documents/{document:path}", DocumentDeleted, self.delete)
        add("GET", "/v1/jobs", DocumentJobList, self.all_jobs)
        add("GET", "/v1/jobs/{job_id}", DocumentJob, self.get_job)
        add("DELETE", "/v1/jobs/{job_id}", DocumentJob, self.cancel_job)
        return router

    async def upload(self, request: Request, wait: _Wait = None) -> Response:
        """Add or replace documents, as files of a form or as texts in JSON. Repeating an upload changes nothing.

        After `wait` seconds the reply is a job (HTTP 202) and the upload continues. With `Accept: text/event-stream`
        the response is a stream of progress events.
        """
        documents = self._documents(request)
        job = await self._start(documents, request)
        if "text/event-stream" in request.headers.get("accept", ""):
            return _UploadEvents(self._workers, documents, job)
        wait_s = wait_of(request, wait, documents.stillroom.config.server.upload_wait_s)
        results = await self._result(request, job.change, wait_s)
        if results is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        if isinstance(results, QueuedChange):
            found = await self._described(documents, job)
            return JSONResponse(found.model_dump(), 202, {"location": f"/v1/jobs/{job.id}", "retry-after": "1"})
        documents.jobs.forget(job)
        reply = await asyncio.to_thread(upload_reply, documents.stillroom, results)
        return JSONResponse(reply.model_dump(), 422 if reply.error else 200)

    async def _start(self, documents: _TenantDocuments, request: Request) -> Job:
        """Read an upload and queue it."""
        progress = UploadProgress()
        with contextlib.ExitStack() as held:
            held.enter_context(documents.reserve_bytes(size_of(request, documents.max_bytes)))
            upload = await read_upload(request)
            with contextlib.ExitStack() as read:
                read.callback(upload.close)
                for name, _ in upload.files:
                    checked_name(name)  # refuse invalid names before a stream begins
                documents.check_capacity()
                read.pop_all()
            change = documents.start(_indexing(documents, upload, progress), upload.close)
            taken = held.pop_all()
        change.task.add_done_callback(lambda _: taken.close())
        request.scope["state"][BACKGROUND_WORK] = change.task
        job = Job(change, progress, self._clock)
        documents.jobs.add(job)
        return job

    async def _result(
        self, request: Request, change: QueuedChange[list[UploadResult]], wait_s: float
    ) -> "list[UploadResult] | QueuedChange[list[UploadResult]] | None":
        """Wait for an upload.

        Returns:
            The results; or the change itself if it is still running after `wait_s`; or None if the client disconnected,
            which cancels the change.
        """
        result = asyncio.ensure_future(self._workers.result(change.task))
        leaving = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait({result, leaving}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if result.done():
                return result.result()
            if not leaving.done():
                return change
            change.cancel()
            return None
        finally:
            result.cancel()
            leaving.cancel()

    async def page(
        self,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="Documents on this page.")] = 100,
        after: Annotated[str, Query(description="The `last_id` of the page before.")] = "",
    ) -> DocumentList:
        """List documents by id, one page at a time."""
        stillroom = self._documents(request).stillroom
        found = await asyncio.to_thread(stillroom.public_documents, after, limit + 1)
        data = [document_object(stillroom, info) for info in found[:limit]]
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
        """Return one document with its indexed text, one page of chunks at a time."""
        content = await asyncio.to_thread(document_json, self._documents(request).stillroom, document, limit, offset)
        return Response(content, media_type="application/json")

    async def delete(self, document: _DocumentPath, request: Request) -> DocumentDeleted:
        """Remove one document, or all documents of a file. An uploaded file is deleted with its last document; other
        files stay."""
        documents = self._documents(request)
        documents.check_capacity()

        def discard(stop: Cancellation) -> RemoveReport:
            stop.check()
            return documents.stillroom.discard(document)

        change = documents.start(discard)
        request.scope["state"][BACKGROUND_WORK] = change.task
        report = await self._workers.result(change.task)
        return DocumentDeleted(id=document, num_documents=report.num_documents, num_chunks=report.num_chunks)

    async def all_jobs(self, request: Request) -> DocumentJobList:
        """List running uploads and the last finished ones."""
        documents = self._documents(request)
        return DocumentJobList(data=[await self._described(documents, job) for job in documents.jobs.all()])

    async def get_job(self, job_id: _JobPath, request: Request) -> DocumentJob:
        """Return an upload's progress and result."""
        documents = self._documents(request)
        return await self._described(documents, documents.jobs.get(job_id))

    async def cancel_job(self, job_id: _JobPath, request: Request) -> DocumentJob:
        """Cancel an upload after its current step. A finished upload stays as it is."""
        documents = self._documents(request)
        job = documents.jobs.get(job_id)
        job.change.cancel()
        return await self._described(documents, job)

    async def _described(self, documents: _TenantDocuments, job: Job) -> DocumentJob:
        return await asyncio.to_thread(job.describe, lambda results: upload_reply(documents.stillroom, results))


def _indexing(documents: _TenantDocuments, upload: Upload, progress: UploadProgress) -> Any:
    return lambda stop: documents.stillroom.upload(upload.files, progress.note, upload.metadata, stop)


class _UploadEvents(StreamingResponse):
    """Server-sent events of an upload. A disconnect cancels the upload."""

    def __init__(self, workers: Workers, documents: _TenantDocuments, job: Job) -> None:
        super().__init__(
            self._events(),
            headers={"Cache-Control": "no-cache", "x-stillroom-job": job.id},
            media_type="text/event-stream",
        )
        self._workers = workers
        self._documents = documents
        self._job = job
        self._arrived = job.progress.listen()
        self._failed_with: int | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            scope["state"][STREAM_ERROR_STATUS] = self._failed_with
            self._job.change.cancel()

    def _ended(self, result: "asyncio.Future[list[UploadResult]]") -> None:
        self._job.progress.note(None)
        if not result.cancelled():
            result.exception()  # marks it as retrieved; the client may be gone

    async def _events(self) -> AsyncIterator[str]:
        ended = asyncio.ensure_future(self._workers.result(self._job.change.task))
        ended.add_done_callback(self._ended)
        while (step := await self._arrived.get()) is not None:
            yield as_event({"object": "documents.progress", **asdict(step)})
        try:
            reply = await asyncio.to_thread(upload_reply, self._documents.stillroom, await ended)
            yield as_event(reply.model_dump())
            yield DONE
        except ENDINGS:
            raise
        except BaseException as error:
            if not isinstance(error, StillroomError):
                logger.exception("an upload failed")
            self._failed_with, body = describe(error)
            yield as_event(body)


def begin_preparing(stillroom: "Stillroom") -> None:
    """Prepare documents while the model answers no question, if the settings say so (`prepare.when_idle`)."""
    when, reuse = stillroom.config.prepare.when_idle, stillroom.config.reuse
    if stillroom.config.engine.kind == "cluster":
        return  # the engines do
    if reuse.keeps_kv and (when == "on" or (when == "auto" and reuse.mode == "prepared")):
        stillroom.preparing.begin()
