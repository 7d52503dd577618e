"""A thread for background jobs, one at a time; it starts with the first job."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

logger = logging.getLogger(__name__)


class Background:
    """Runs jobs in a thread called `name`. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._is_closed = False

    def run(self, job: Callable[[], None]) -> None:
        """Queue a job, unless this is closed. An exception of the job is logged."""
        with self._lock:
            if self._is_closed:
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
            self._pool.submit(job).add_done_callback(_log_failure)

    def close(self) -> None:
        """Refuse new jobs and wait for the queued ones. Idempotent."""
        with self._lock:
            self._is_closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True)


def _log_failure(done: "Future[None]") -> None:
    error = done.exception()
    if error is not None:
        logger.error("a background job failed", exc_info=error)
