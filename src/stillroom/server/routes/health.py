"""`/readyz`: whether to send requests here. `/healthz` says that the process lives; this one may be no for a while."""

from collections.abc import Callable

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from stillroom.server.errors import LATER


class Readiness:
    """Named checks. Each part of the server adds its own; `/readyz` asks all of them."""

    def __init__(self) -> None:
        self._checks: dict[str, Callable[[], str | None]] = {}

    def add(self, name: str, problem: Callable[[], str | None]) -> None:
        """Add a check, or replace the one of that name.

        Args:
            problem: returns why the server cannot serve now, or None. `/readyz` calls it on the event loop and shows
                what it returns to callers without a key: it must not block, and its text holds no path or content.
        """
        self._checks[name] = problem

    def response(self) -> Response:
        """Return the answer of `/readyz`: 200 if no check has a problem, else 503 with the reasons."""
        problems = {name: problem() for name, problem in self._checks.items()}
        reasons = [problem for problem in problems.values() if problem is not None]
        content = {
            "status": "not ready" if reasons else "ready",
            "checks": {name: problem is None for name, problem in problems.items()},
            "reasons": reasons,
        }
        return JSONResponse(content, 503, LATER) if reasons else JSONResponse(content, 200)


def router(readiness: Readiness) -> APIRouter:
    """The route."""

    async def readyz(request: Request) -> Response:
        """Whether to send requests here."""
        return readiness.response()

    found = APIRouter()
    found.add_api_route("/readyz", readyz, methods=["GET"], responses={503: {"description": "Not now."}})
    found.add_api_route("/readyz", readyz, methods=["HEAD"], include_in_schema=False)
    return found
