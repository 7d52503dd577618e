"""Request ids, access log, traces, request metrics and the last error handler of every HTTP request.

The id is the client's `x-request-id` if that is a plain word, else a new one. It is in the response, in every log
record written while the request runs, and in the trace. The log names the caller and the duration, never the content.
"""

import contextlib
import logging
import math
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stillroom.cluster.wire import PREFIX
from stillroom.core.clock import Clock
from stillroom.core.panics import ENDINGS
from stillroom.server.error_replies import CLIENT_CLOSED_REQUEST, STREAM_ERROR_STATUS, error_response
from stillroom.telemetry.logs import REQUEST_ID
from stillroom.telemetry.metrics import Metrics
from stillroom.telemetry.spans import RequestSpan, Tracing

logger = logging.getLogger(__name__)
access = logging.getLogger("stillroom.server.access")

UNKNOWN_PATH = "other"
"""Path in metrics and log of every request that matches no route, so that a scanner cannot add labels."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_PROBES = ("/healthz", "/readyz", "/metrics", f"{PREFIX}/info", f"{PREFIX}/state")
"""Polled by machines; successful requests are logged at DEBUG only, and those without a right key once a minute."""
_REPEAT_SECONDS = 60.0
_MAX_REFUSED_CLIENTS = 1000
_PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestObserver:
    """Outermost ASGI middleware: ids, log, traces, metrics, last error handler."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        clock: Clock,
        routes: Sequence[BaseRoute],
        tracing: Tracing | None = None,
    ) -> None:
        """
        Args:
            routes: their path templates are the `path` of metrics and log.
        """
        self._app = app
        self._metrics = metrics
        self._clock = clock
        self._routes = routes
        self._tracing = tracing
        self._refused_at: dict[str, float] = {}
        """When the refusal of a client's polling was logged last, by address."""
        metrics.expect_http_requests([*map(_path, routes), UNKNOWN_PATH])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        method = scope["method"] if scope["method"] in _METHODS else UNKNOWN_PATH
        given = headers.get("x-request-id", "")
        http_id = given if _PLAIN_ID.fullmatch(given) else uuid.uuid4().hex
        token = REQUEST_ID.set(http_id)
        began = self._clock.monotonic()
        try:
            with contextlib.ExitStack() as stack:
                span = stack.enter_context(self._tracing.request(method, headers)) if self._tracing else None
                status, error = await self._observed(scope, receive, send, http_id)
                self._account(scope, method, status, self._clock.monotonic() - began, span)
                if error is not None:
                    raise error  # closes the connection, so that the client sees that the response is incomplete
        finally:
            REQUEST_ID.reset(token)

    async def _observed(
        self, scope: Scope, receive: Receive, send: Send, http_id: str
    ) -> tuple[int, BaseException | None]:
        """Run the application and answer exceptions that it raises.

        Catches BaseException, because native libraries raise exceptions that do not derive from Exception. Those that
        end the process or the task pass.

        Returns:
            The status sent, or that of the error that ended a stream; and the exception raised after a part of the
            response was sent.
        """
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = http_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:  # the client left before its request was complete
            pass
        except ENDINGS:  # the server is closing
            self._metrics.count_http_request(self._template(scope), status or CLIENT_CLOSED_REQUEST)
            raise
        except BaseException as error:
            logger.exception("%s %s failed, x-request-id %s", scope["method"], self._template(scope), http_id)
            if status is not None:
                return 500, error
            await error_response(error)(scope, receive, send_with_id)
        return scope.get("state", {}).get(STREAM_ERROR_STATUS) or status or CLIENT_CLOSED_REQUEST, None

    def _account(self, scope: Scope, method: str, status: int, seconds: float, span: RequestSpan | None) -> None:
        path = self._template(scope)
        self._metrics.count_http_request(path, status)
        caller = scope.get("state", {}).get("caller")
        fields = {
            "method": method,
            "path": path,
            "status": status,
            "seconds": round(seconds, 6),
            "caller": "-" if caller is None else caller.name,
            "tenant": "-" if caller is None else caller.tenant,
            "client": (scope.get("client") or ("-",))[0],
        }
        if span is not None:
            span.set({"http.request.method": method, "http.route": path, "http.response.status_code": status})
            span.rename(f"{method} {path}")
            fields["trace_id"] = span.trace_id
        is_quiet = path in _PROBES and (status < 400 or (status == 401 and self._is_repeated(str(fields["client"]))))
        level = logging.DEBUG if is_quiet else logging.INFO
        access.log(level, "%(method)s %(path)s %(status)s %(seconds)ss %(caller)s", fields, extra={"fields": fields})

    def _is_repeated(self, client: str) -> bool:
        """Whether a refusal of this client's polling was logged within the last minute; else notes that it is now."""
        now = self._clock.monotonic()
        if now - self._refused_at.get(client, -math.inf) < _REPEAT_SECONDS:
            return True
        if len(self._refused_at) >= _MAX_REFUSED_CLIENTS:
            self._refused_at.clear()
        self._refused_at[client] = now
        return False

    def _template(self, scope: Scope) -> str:
        """Return the path template, also of a request that was answered before it reached its route."""
        if "route" in scope:
            return _path(scope["route"])
        match, route = max(((route.matches(scope)[0], route) for route in self._routes), key=_closeness)
        return UNKNOWN_PATH if match is Match.NONE else _path(route)


def log_refused(status: int, http_id: str, client: tuple[str, int] | None) -> None:
    """Log a reply sent by the connection itself: to invalid HTTP, a slow sender, or one connection too many."""
    token = REQUEST_ID.set(http_id)
    try:
        fields = {"method": "-", "path": UNKNOWN_PATH, "status": status, "seconds": 0.0, "caller": "-", "tenant": "-"}
        fields["client"] = (client or ("-",))[0]
        access.info("%(method)s %(path)s %(status)s %(seconds)ss %(caller)s", fields, extra={"fields": fields})
    finally:
        REQUEST_ID.reset(token)


def _closeness(found: tuple[Match, BaseRoute]) -> int:
    return found[0].value


def _path(route: BaseRoute | None) -> str:
    return str(getattr(route, "path", UNKNOWN_PATH))
