"""Deadlines of requests: their own, and the engine's time limit, after which a request starts again once."""

import math
from dataclasses import dataclass

from stillroom.core.ids import RequestId
from stillroom.core.indexed_heap import IndexedHeap
from stillroom.core.request import SampleRequest
from stillroom.errors import DeadlineExceededError, RequestTimeoutError


@dataclass(slots=True)
class _Limit:
    deadline: float
    """The request's own; infinite if it has none."""
    has_restarted: bool = False


class Deadlines:
    """Deadlines of the requests in progress. O(log n) for each that begins, ends or expires."""

    def __init__(self, timeout_seconds: float) -> None:
        """
        Args:
            timeout_seconds: time limit for each of a request's two starts; 0 is no limit.
        """
        self._timeout = timeout_seconds or math.inf
        self._limits: dict[RequestId, _Limit] = {}
        self._order: IndexedHeap[RequestId] = IndexedHeap()

    def begin(self, request: SampleRequest, now: float) -> None:
        limit = _Limit(math.inf if request.deadline is None else request.deadline)
        at = min(limit.deadline, now + self._timeout)
        if at < math.inf:
            self._limits[request.request_id] = limit
            self._order.push(request.request_id, at)

    def end(self, request_id: RequestId) -> None:
        if self._limits.pop(request_id, None) is not None:
            self._order.remove(request_id)

    @property
    def next_at(self) -> float:
        """The earliest deadline; infinite if there is none."""
        return self._order.peek()[1] if self._order else math.inf

    def pop_expired(self, now: float) -> list[tuple[RequestId, RequestTimeoutError | None]]:
        """Return expired requests, each with the error that ends it.

        A request without an error starts again (RAGCache 6), with a new time limit.
        """
        expired: list[tuple[RequestId, RequestTimeoutError | None]] = []
        while self.next_at <= now:
            request_id = self._order.peek()[0]
            limit = self._limits[request_id]
            error: RequestTimeoutError | None = None
            if limit.deadline <= now:
                error = deadline_error()
            elif limit.has_restarted:
                error = RequestTimeoutError(
                    f"the request took longer than {self._timeout:g} s, twice; "
                    "ask for less (top_k, max_tokens) or raise runtime.request_timeout_s"
                )
            if error is None:
                limit.has_restarted = True
                self._order.update(request_id, min(limit.deadline, now + self._timeout))
            else:
                self.end(request_id)
            expired.append((request_id, error))
        return expired


def deadline_error() -> DeadlineExceededError:
    return DeadlineExceededError(
        "the answer was not complete within deadline_seconds; allow more, or ask for less (top_k, max_tokens)"
    )
