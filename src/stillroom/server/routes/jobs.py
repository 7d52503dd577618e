"""Upload jobs: progress and result of uploads that outlast their request. Each tenant sees its own."""

import asyncio
import contextlib
import re
import uuid
from collections.abc import Callable

from starlette.requests import Request

from stillroom.core.clock import Clock
from stillroom.errors import ChangeCancelledError
from stillroom.retrieval.ingest import AddProgress
from stillroom.retrieval.uploads import UploadResult
from stillroom.server.error_replies import Refused, describe
from stillroom.server.routes.upload_queue import QueuedChange
from stillroom.server.schemas.documents import DocumentJob, JobProgress, UploadReply
from stillroom.server.schemas.replies import ErrorDetail

_MAX_FINISHED = 32
"""Finished jobs of one tenant that are kept."""
MAX_WAIT_S = 3600.0

_WAIT = re.compile(r"wait\s*=\s*\"?(\d{1,4})\"?\Z", re.IGNORECASE)


class UploadProgress:
    """Passes an upload's progress from its thread to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[AddProgress | None] | None = None
        self.latest: AddProgress | None = None

    def listen(self) -> "asyncio.Queue[AddProgress | None]":
        """Return a queue of the steps from now on; None is the end."""
        self._arrived = self._arrived or asyncio.Queue()
        return self._arrived

    def note(self, step: AddProgress | None) -> None:
        """Record a step. Any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._take, step)

    def _take(self, step: AddProgress | None) -> None:
        self.latest = step or self.latest
        if self._arrived is not None:
            self._arrived.put_nowait(step)


class Job:
    def __init__(self, change: QueuedChange[list[UploadResult]], progress: UploadProgress, clock: Clock) -> None:
        self.id = f"job-{uuid.uuid4().hex}"
        self.change = change
        self.progress = progress
        self._created_at = clock.unix()
        self._finished_at: float | None = None

        def ended(_: object) -> None:
            self._finished_at = clock.unix()

        change.task.add_done_callback(ended)

    @property
    def is_finished(self) -> bool:
        return self.change.task.done()

    def describe(self, reply: Callable[[list[UploadResult]], UploadReply]) -> DocumentJob:
        """Return the job as clients see it.

        Args:
            reply: makes the reply to an upload from its results.
        """
        latest = self.progress.latest
        found = DocumentJob(
            id=self.id,
            status="cancelling" if self.change.is_cancelled else "in_progress",
            created_at=self._created_at,
            finished_at=self._finished_at,
            progress=None if latest is None else JobProgress.model_validate(latest, from_attributes=True),
        )
        task = self.change.task
        if not task.done():
            return found
        error = ChangeCancelledError() if task.cancelled() else task.exception()
        if isinstance(error, ChangeCancelledError):
            found.status, found.error = "cancelled", ErrorDetail(**describe(error)[1]["error"])
        elif isinstance(error, Exception):
            found.status, found.error = "failed", ErrorDetail(**describe(error)[1]["error"])
        else:
            answer = reply(task.result())
            found.status = "failed" if answer.error else "completed"
            found.data, found.error = answer.data, answer.error
        return found


class Jobs:
    """Jobs of one tenant: the running ones and the last finished ones."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}

    def add(self, job: Job) -> None:
        finished = [known for known in self._jobs.values() if known.is_finished]
        for known in finished[: max(0, len(finished) - _MAX_FINISHED + 1)]:
            del self._jobs[known.id]
        self._jobs[job.id] = job

    def forget(self, job: Job) -> None:
        """Drop a job whose client got the result without learning of the job."""
        self._jobs.pop(job.id, None)

    def all(self) -> list[Job]:
        """Return the jobs, newest first."""
        return list(self._jobs.values())[::-1]

    def get(self, job_id: str) -> Job:
        """Raises Refused: the job is unknown, was dropped, or is from before the server's start."""
        if job_id not in self._jobs:
            message = f"there is no job {job_id[:100]!r} (any more); GET /v1/jobs lists the known ones"
            raise Refused(404, "job_not_found", message)
        return self._jobs[job_id]


def wait_of(request: Request, asked: float | None, default: float) -> float:
    """Return the seconds after which an upload is answered with a job.

    From `?wait=`, else the header `Prefer` (RFC 7240: `respond-async`, `wait=N`), else the server's setting.
    """
    if asked is not None:
        return asked
    preferences = [one.strip() for one in request.headers.get("prefer", "").split(",")]
    for match in filter(None, map(_WAIT.match, preferences)):
        return min(float(match.group(1)), MAX_WAIT_S)
    return 0.0 if "respond-async" in map(str.lower, preferences) else default
