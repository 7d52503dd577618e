"""Jobs beside the searches, one after the other in a thread that starts with the first."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

logger = logging.getLogger(__name__)


class Background:
    """Thread-safe."""

    def __init__(self, name: str) -> None:
        """`name`: of the thread."""
        self._name = name
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._is_closed = False

    def run(self, job: Callable[[], None]) -> None:
        """Do a job soon, unless this is closed. One that fails is logged."""
        with self._lock:
            if self._is_closed:
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
            self._pool.submit(job).add_done_callback(_tell)

    def close(self) -> None:
        """Wait for the jobs there are, and take no more. Idempotent."""
        with self._lock:
            self._is_closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True)


def _tell(done: "Future[None]") -> None:
    error = done.exception()
    if error is not None:
        logger.error("a job beside the searches failed", exc_info=error)
