"""The application that answers while the server is loading.

`/healthz` returns 200, `/readyz` 503 with the loading step, and every other request 503 `loading` with `Retry-After`. A
probe can therefore tell a loading server from a dead one.
"""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from stillroom.core.clock import SystemClock
from stillroom.server.auth.cors import cors_options
from stillroom.server.error_replies import RETRY_LATER, error_body
from stillroom.server.middleware import RequestObserver
from stillroom.server.routes.health import Readiness
from stillroom.telemetry.metrics import Metrics


class Loading:
    """Progress of loading; threads write it and `/readyz` shows it."""

    def __init__(self) -> None:
        self.step = "starting"
        """Shown to callers without a key: it must name no path and no model."""


class LoadingApp:
    """ASGI application that answers for another one until that one is loaded."""

    def __init__(self, loading: Loading, origins: Sequence[str] = ()) -> None:
        """
        Args:
            origins: of other sites' pages, which may read these replies too.
        """
        self.app: ASGIApp = _application(loading, origins)
        """The application that answers now. Replace it on the event loop only."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


def _application(loading: Loading, origins: Sequence[str]) -> ASGIApp:
    readiness = Readiness()
    readiness.add("model", lambda: f"loading: {loading.step}")

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(request: Request) -> Response:
        return readiness.response()

    async def not_yet(scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the server is loading ({loading.step}); ask again in a moment"
        body = error_body(message, "service_unavailable_error", code="loading")
        await JSONResponse(body, 503, RETRY_LATER)(scope, receive, send)

    routes = [Route("/healthz", healthz), Route("/readyz", readyz)]
    app: ASGIApp = Router(routes, redirect_slashes=False, default=not_yet)
    if origins:
        app = CORSMiddleware(app, **cors_options(origins))
    return RequestObserver(app, Metrics(), SystemClock(), routes)
