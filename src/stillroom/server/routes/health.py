"""`GET /readyz`: whether the server can take requests now. `/healthz` tells only that the process is alive."""

from collections.abc import Callable

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from stillroom.server.error_replies import RETRY_LATER


class Readiness:
    """Named checks, all run by `/readyz`. Each part of the server adds its own."""

    def __init__(self) -> None:
        self._checks: dict[str, Callable[[], str | None]] = {}

    def add(self, name: str, problem: Callable[[], str | None]) -> None:
        """Add a check, or replace the one of that name.

        Args:
            problem: returns why the server cannot serve now, or None. It runs on the event loop and must not block. Its
                text is shown to callers without a key, so it must hold no path or content.
        """
        self._checks[name] = problem

    def response(self) -> Response:
        """Return the reply of `/readyz`: 200 if no check has a problem, else 503 with the reasons."""
        problems = {name: problem() for name, problem in self._checks.items()}
        reasons = [problem for problem in problems.values() if problem is not None]
        content = {
            "status": "not ready" if reasons else "ready",
            "checks": {name: problem is None for name, problem in problems.items()},
            "reasons": reasons,
        }
        return JSONResponse(content, 503, RETRY_LATER) if reasons else JSONResponse(content, 200)


def router(readiness: Readiness) -> APIRouter:
    async def readyz(request: Request) -> Response:
        """Return whether the server can take requests now."""
        return readiness.response()

    found = APIRouter()
    found.add_api_route(
        "/readyz", readyz, methods=["GET"], responses={503: {"description": "Not ready; `reasons` says why."}}
    )
    found.add_api_route("/readyz", readyz, methods=["HEAD"], include_in_schema=False)
    return found
