"""Limits of one caller: size of a body, concurrent requests, requests per minute. ASGI middleware behind `Guard`.

Without keys all clients are one caller. Replies carry the remaining rate in OpenAI's headers. A body is measured as it
arrives, whatever its `Content-Length`. A request that generates takes an admission slot (`admission`) only when its
body is complete, so that announced bodies take no slots.
"""

import math
from asyncio import Future
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stillroom.config.settings import ServerConfig
from stillroom.core.clock import Clock
from stillroom.errors import EngineClosedError, StillroomError
from stillroom.server.auth.tenants import Caller
from stillroom.server.error_replies import STREAM_ERROR_STATUS, error_body, error_response
from stillroom.server.limits.admission import AdmissionControl
from stillroom.telemetry.metrics import Metrics

UPLOADS = ("/v1/documents",)
"""Paths whose bodies may have `server.max_upload_bytes`."""
GENERATING = ("/v1/chat/completions", "/v1/responses", "/v1/completions")
"""Paths whose requests take an admission slot; others take one for a part of their work (`admitted`)."""
LIMITED = ("/v1/", "/v2/", "/tokenize", "/detokenize", "/mcp")
"""Beginnings of paths to which changes and computations are sent; they count for a caller's limits."""
BACKGROUND_WORK = "outlasting"
"""Key in the ASGI scope's state: a future that counts as running for its caller after the request has ended."""
_SLOT = "admission_slot"
"""Key in the ASGI scope's state: the `_Slot` of a limited request."""
_RATE_ERROR = "rate_limit_error"


@dataclass(slots=True)
class Bucket:
    """Token bucket of `per_minute` requests, which holds at most one minute's worth."""

    per_minute: int
    level: float
    at: float

    def fill(self, now: float) -> None:
        self.level = min(self.per_minute, self.level + (now - self.at) * self.per_minute / 60)
        self.at = now

    @property
    def seconds_to_next(self) -> float:
        return max(0.0, (1 - self.level) * 60 / self.per_minute)

    def headers(self) -> dict[str, str]:
        return {
            "x-ratelimit-limit-requests": str(self.per_minute),
            "x-ratelimit-remaining-requests": str(max(0, math.floor(self.level))),
            "x-ratelimit-reset-requests": _duration((self.per_minute - self.level) * 60 / self.per_minute),
        }


class Limits:
    def __init__(
        self, app: ASGIApp, config: ServerConfig, admission: AdmissionControl, metrics: Metrics, clock: Clock
    ) -> None:
        self._app = app
        self._config = config
        self._admission = admission
        self._metrics = metrics
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}
        self._num_running: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._config.max_upload_bytes if scope["path"].startswith(UPLOADS) else self._config.max_body_bytes
        body = _Body(receive, limit)
        if scope["method"] in ("GET", "HEAD", "OPTIONS") or not scope["path"].startswith(LIMITED) or _cancels(scope):
            await self._app(scope, body, send)
            return
        caller: Caller = scope["state"]["caller"]
        refusal = _too_large(Headers(scope=scope), limit) or self._refusal(caller)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self._work(caller, scope, body, send)

    async def _work(self, caller: Caller, scope: Scope, receive: "_Body", send: Send) -> None:
        bucket = self._buckets.get(caller.name)
        headers = {} if bucket is None else bucket.headers()
        status, is_complete = 0, False

        async def send_with_headers(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(headers)
            await send(message)
            is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        slot = _Slot(self._admission, self._metrics, caller.tenant)
        scope["state"][_SLOT] = slot
        if scope["path"] in GENERATING:
            receive.on_end = slot.take
        self._num_running[caller.name] += 1
        self._admission.num_in_flight += 1
        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            if slot.is_taken and status == 429:
                self._metrics.count_refused("queue")  # refused by the engine: QueueFullError's status
            slot.give_back(was_served=status == 200 and is_complete and not scope["state"].get(STREAM_ERROR_STATUS))
            if slot.is_refused and bucket is not None:
                bucket.level += 1
            outlasting: Future[Any] | None = scope["state"].get(BACKGROUND_WORK)
            if outlasting is None or outlasting.done():
                self._ended(caller)
            else:
                outlasting.add_done_callback(lambda _: self._ended(caller))

    def _ended(self, caller: Caller) -> None:
        self._admission.num_in_flight -= 1
        self._num_running[caller.name] -= 1
        if not self._num_running[caller.name]:
            del self._num_running[caller.name]

    def _refusal(self, caller: Caller) -> Response | None:
        """Return the refusal of a request; None if it is accepted, which takes one from the caller's bucket."""
        bucket = self._bucket(caller)
        headers = {} if bucket is None else bucket.headers()
        max_concurrent = self._config.max_concurrent
        if caller.key is not None and caller.key.max_concurrent is not None:
            max_concurrent = caller.key.max_concurrent
        if max_concurrent and self._num_running[caller.name] >= max_concurrent:
            return self._too_many(
                f"{max_concurrent} requests of this key are running already; wait for one to end",
                "concurrency",
                1.0,
                headers,
            )
        if bucket is not None and bucket.level < 1:
            return self._too_many(
                f"more than {bucket.per_minute} requests in a minute; wait as long as Retry-After says",
                "rate",
                bucket.seconds_to_next,
                headers,
            )
        try:
            self._admission.check_open()
        except EngineClosedError as error:
            self._metrics.count_refused("closing")
            response = error_response(error)
            response.headers.update(headers)
            return response
        if bucket is not None:
            bucket.level -= 1
        return None

    def _bucket(self, caller: Caller) -> Bucket | None:
        rate = self._config.requests_per_minute
        if caller.key is not None and caller.key.requests_per_minute is not None:
            rate = caller.key.requests_per_minute
        if not rate:
            self._buckets.pop(caller.name, None)
            return None
        now = self._clock.monotonic()
        bucket = self._buckets.get(caller.name)
        if bucket is None or bucket.per_minute != rate:
            bucket = self._buckets[caller.name] = Bucket(rate, rate, now)
        bucket.fill(now)
        return bucket

    def _too_many(self, message: str, reason: str, seconds: float, headers: Mapping[str, str]) -> Response:
        self._metrics.count_refused(reason)
        body = error_body(message, _RATE_ERROR, code=f"{reason}_limit_exceeded")
        return JSONResponse(
            body, status_code=429, headers={**headers, "retry-after": str(math.ceil(max(1.0, seconds)))}
        )


@contextmanager
def admitted(request: HTTPConnection | None) -> Iterator[None]:
    """Hold an admission slot for a part of a request that generates, such as a tool that answers.

    Args:
        request: None, or one that no `Limits` has seen, takes no slot.

    Raises:
        EngineClosedError, QueueFullError: as `AdmissionControl.enter`.
    """
    slot: _Slot | None = None if request is None else request.scope.get("state", {}).get(_SLOT)
    if slot is None:
        yield
        return
    slot.take()
    was_served = False
    try:
        yield
        was_served = True
    finally:
        slot.give_back(was_served=was_served)


def _cancels(scope: Scope) -> bool:
    """Whether a request cancels a job. Such requests are not limited."""
    is_delete: bool = scope["method"] == "DELETE"
    return is_delete and scope["path"].startswith("/v1/jobs/")


class _Slot:
    def __init__(self, admission: AdmissionControl, metrics: Metrics, tenant: str) -> None:
        self._admission = admission
        self._metrics = metrics
        self._tenant = tenant
        self.is_taken = False
        self.is_refused = False

    def take(self) -> None:
        """Raises as `AdmissionControl.enter`."""
        if self.is_taken:
            return
        try:
            self._admission.enter(self._tenant)
        except StillroomError:
            self.is_refused = True
            self._metrics.count_refused("closing" if self._admission.is_closing else "queue")
            raise
        self.is_taken = True

    def give_back(self, *, was_served: bool) -> None:
        if self.is_taken:
            self.is_taken = False
            self._admission.leave(self._tenant, was_served=was_served)


class _Body:
    """ASGI `receive` that limits the size of the body."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._num_bytes = 0
        self.on_end: Callable[[], None] | None = None
        """Called when the body is complete; its exceptions reach the reader of the body."""

    async def __call__(self) -> Message:
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._limit:
            raise HTTPException(413, too_large(self._limit), {"connection": "close"})
        if self.on_end is not None and message["type"] == "http.request" and not message.get("more_body", False):
            self.on_end()
        return message


def _too_large(headers: Headers, limit: int) -> Response | None:
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length) <= limit:
        return None
    body = error_body(too_large(limit), "invalid_request_error", code="body_too_large")
    return JSONResponse(body, status_code=413, headers={"connection": "close", "x-should-retry": "false"})


def too_large(limit: int) -> str:
    return f"the body exceeds {limit} bytes, the limit of this server; send less at once"


def _duration(seconds: float) -> str:
    """Format as OpenAI does: `120ms`, `6.2s`, `1m30s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{math.ceil(rest)}s" if minutes else f"{rest:.3g}s"
