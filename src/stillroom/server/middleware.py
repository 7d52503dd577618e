"""What happens around every HTTP request: it gets an id, a line of log, a trace, is counted, and never shows a stack
trace.

The id is the caller's `x-request-id` where that is a plain word, else a new one; it is in the response, in every record
of log that is written meanwhile, and in the trace. The log says who asked and how long it took, never what.
"""

import contextlib
import logging
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stillroom.core.clock import Clock
from stillroom.core.panics import ENDINGS
from stillroom.server.errors import CLIENT_CLOSED_REQUEST, FAILED_WITH, error_response
from stillroom.telemetry.logs import REQUEST_ID
from stillroom.telemetry.metrics import Metrics
from stillroom.telemetry.spans import RequestSpan, Tracing

logger = logging.getLogger(__name__)
access = logging.getLogger("stillroom.server.access")

UNKNOWN_PATH = "other"
"""Stands in metrics and log for every path that is not a route, so that a scanner cannot fill them."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_PROBES = ("/healthz", "/readyz", "/metrics")
"""Machines ask for these every few seconds; what goes well is no news."""
_PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestObserver:
    """ASGI middleware, outside of all others."""

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
            routes: those whose templates stand for paths.
        """
        self._app = app
        self._metrics = metrics
        self._clock = clock
        self._routes = routes
        self._tracing = tracing
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
                    raise error  # closes the connection, which tells the client that the response is not whole
        finally:
            REQUEST_ID.reset(token)

    async def _observed(
        self, scope: Scope, receive: Receive, send: Send, http_id: str
    ) -> tuple[int, BaseException | None]:
        """Return the status that was sent, or that of the error in which a stream ended; and what was raised after half
        a response had been sent.

        No exception passes without an answer, except those that end the process or the task: a native library may raise
        one that does not derive from Exception.
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
        except ClientDisconnect:  # it did not wait until its own request was sent
            pass
        except ENDINGS:  # the server is closing and waits no longer
            self._metrics.count_http_request(self._template(scope), status or CLIENT_CLOSED_REQUEST)
            raise
        except BaseException as error:
            logger.exception("%s %s failed, x-request-id %s", scope["method"], self._template(scope), http_id)
            if status is not None:
                return 500, error
            await error_response(error)(scope, receive, send_with_id)
        return scope.get("state", {}).get(FAILED_WITH) or status or CLIENT_CLOSED_REQUEST, None

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
        level = logging.DEBUG if path in _PROBES and status < 400 else logging.INFO
        access.log(level, "%(method)s %(path)s %(status)s %(seconds)ss %(caller)s", fields, extra={"fields": fields})

    def _template(self, scope: Scope) -> str:
        """Also of a request that was answered before it came to its route."""
        if "route" in scope:
            return _path(scope["route"])
        match, route = max(((route.matches(scope)[0], route) for route in self._routes), key=_closeness)
        return UNKNOWN_PATH if match is Match.NONE else _path(route)


def note_refused(status: int, http_id: str, client: tuple[str, int] | None) -> None:
    """Log an answer that was given before there was a request to observe: to what is no HTTP, came too slowly, or came
    over one connection too many."""
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
