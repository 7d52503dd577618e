"""The application of a server that is still loading: it lives, and is not ready for anything else yet.

`/healthz` says 200 and `/readyz` 503 with what is being loaded; every other request gets 503 `loading`, with
`Retry-After`. So a probe can tell a server that loads from one that is dead.
"""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from stillroom.core.clock import SystemClock
from stillroom.server.errors import LATER, error_body
from stillroom.server.middleware import RequestObserver
from stillroom.server.routes.health import Readiness
from stillroom.telemetry.metrics import Metrics


class Loading:
    """What is being loaded."""

    def __init__(self) -> None:
        self.step = "starting"
        """As `/readyz` shows it to everybody: no path, no name. Any thread may set it."""


class Frontage:
    """ASGI application that stands for another one until that is loaded."""

    def __init__(self, loading: Loading) -> None:
        self.app: ASGIApp = _application(loading)
        """Answers requests; to be replaced on the event loop."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


def _application(loading: Loading) -> ASGIApp:
    readiness = Readiness()
    readiness.add("model", lambda: f"loading: {loading.step}")

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(request: Request) -> Response:
        return readiness.response()

    async def not_yet(scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the server is loading ({loading.step}); ask again in a moment"
        body = error_body(message, "service_unavailable_error", code="loading")
        await JSONResponse(body, 503, LATER)(scope, receive, send)

    routes = [Route("/healthz", healthz), Route("/readyz", readyz)]
    router = Router(routes, redirect_slashes=False, default=not_yet)
    return RequestObserver(router, Metrics(), SystemClock(), routes)
