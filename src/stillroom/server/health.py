"""`/readyz`: whether to send requests here. `/healthz` says that the process lives; this one may be no for a while."""

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from stillroom.server.admission import Admission
from stillroom.server.errors import LATER
from stillroom.server.tenants import Tenants


def router(admission: Admission) -> APIRouter:
    """The route."""

    async def readyz(request: Request) -> Response:
        """Whether to send requests here."""
        tenants: Tenants = request.app.state.tenants
        checks = {
            "model": tenants.own.is_ready,
            "queue": admission.problem() is None,
            "open": not admission.is_closing,
        }
        is_ready = all(checks.values())
        content = {"status": "ready" if is_ready else "not ready", "checks": checks}
        return JSONResponse(content, 200) if is_ready else JSONResponse(content, 503, LATER)

    found = APIRouter()
    found.add_api_route("/readyz", readyz, methods=["GET"], responses={503: {"description": "Not now."}})
    found.add_api_route("/readyz", readyz, methods=["HEAD"], include_in_schema=False)
    return found
