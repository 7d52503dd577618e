"""HTTP error replies in OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, without stack traces."""

import logging
import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.routing import Match

from stillroom.errors import EngineUnavailableError, QueueFullError, StillroomError
from stillroom.server.error_kinds import INVALID_REQUEST, kind_of
from stillroom.server.privacy import without_folders

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected before the reply. It is never sent; metrics count it."""

STREAM_ERROR_STATUS = "failed_with"
"""Key in the ASGI scope's state: status of the error, or disconnect, that ended a stream after its status line was
sent."""

RETRY_LATER = {"retry-after": "5"}
"""Headers of a 503 reply: seconds until the client should try again."""

_NO_OBJECT = ("model_attributes_type", "model_type", "dict_type")
"""Types of pydantic's errors about a value that should be an object."""

_UNKNOWN_FIELD = "extra_forbidden"
"""Type of pydantic's error about a field that a body must not have; often a misspelled name of one that is missing."""

_METHODS = ("DELETE", "GET", "HEAD", "POST")
"""Every method that any route has."""


def error_body(message: str, kind: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Refused(Exception):
    """Raised by a route to refuse a request with a status and a code; becomes an error reply."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def model_not_served(model: str, served: list[str], alias: str, does: str | None = None) -> Refused:
    """
    Args:
        alias: name of whichever model is served.
        does: what the model does on other routes; None: there is no such model.
    """
    names = ", ".join(map(repr, served))
    message = f"the model {model!r} is not served here; this server has {names}, and {alias!r} means whichever it has"
    if does is not None:
        message = f"the model {model!r} {does}; this route has {names}"
    return Refused(404, "model_not_found", message, "model")


def describe(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the body of the error reply.

    Messages that may name paths of the server are logged here. Other exceptions than `StillroomError` must be logged by
    the caller.
    """
    kind = kind_of(error)
    if kind.public_message is None:
        message = without_folders(str(error))
    else:
        message = kind.public_message.format(part=getattr(error, "part", ""))
        if isinstance(error, StillroomError):
            logger.log(logging.WARNING if kind.status == 503 else logging.ERROR, "%s", error)
    return kind.status, error_body(message, kind.type, code=kind.code, param=getattr(error, "param", None))


def error_response(error: BaseException) -> JSONResponse:
    status, body = describe(error)
    # OpenAI's clients retry on 408, 409, 429 and 5xx unless this header says not to
    headers = {} if status in (429, 503) else {"x-should-retry": "false"}
    if status == 503:
        headers |= RETRY_LATER
    if isinstance(error, QueueFullError | EngineUnavailableError) and error.retry_after_seconds is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_seconds))
    return JSONResponse(body, status_code=status, headers=headers)


def install(app: FastAPI) -> None:
    async def on_stillroom_error(_: Request, error: Exception) -> JSONResponse:
        return error_response(error)

    async def on_refused(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, Refused)
        body = error_body(str(error), INVALID_REQUEST, code=error.code, param=error.param)
        return JSONResponse(body, status_code=error.status)

    async def on_invalid_request(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _invalid_request(error)

    async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return _http_exception(request, error)

    app.add_exception_handler(StillroomError, on_stillroom_error)
    app.add_exception_handler(Refused, on_refused)
    app.add_exception_handler(RequestValidationError, on_invalid_request)
    app.add_exception_handler(HTTPException, on_http_exception)


def _invalid_request(error: RequestValidationError) -> JSONResponse:
    errors = error.errors()
    first = next((one for one in errors if one["type"] == _UNKNOWN_FIELD), errors[0])
    place = first["loc"]  # begins with the part of the request; a field may have its name, as `query` has
    param = ".".join(map(str, place[1:] if place[:1] in (("body",), ("query",), ("path",)) else place))
    message = "must be a JSON object" if first["type"] in _NO_OBJECT else first["msg"].removeprefix("Value error, ")
    if first["type"] == _UNKNOWN_FIELD:
        message = "this route has no such field; correct its name or leave it out"
    if not param and first["type"] in (*_NO_OBJECT, "missing"):
        message = "the body must be a JSON object; send the fields of the route in one"
    body = error_body(
        f"{param}: {message}" if param else message, INVALID_REQUEST, code="invalid_value", param=param or None
    )
    return JSONResponse(body, status_code=400)


def _http_exception(request: Request, error: HTTPException) -> JSONResponse:
    where = f"{request.method} {request.url.path}"
    message, code = {
        404: (f"there is no {where}", "not_found"),
        405: (f"{where} is not possible; see the Allow header", "method_not_allowed"),
        413: (str(error.detail), "body_too_large"),
    }.get(error.status_code, (str(error.detail), None))
    body = error_body(message, INVALID_REQUEST, code=code)
    headers = {"allow": _methods_of(request)} if error.status_code == 405 else error.headers
    return JSONResponse(body, status_code=error.status_code, headers=headers)


def _methods_of(request: Request) -> str:
    """Return all methods of a path. Each method has its own route, and Starlette reports only the first."""
    routes = request.app.router.routes
    asked = {method: {**request.scope, "method": method} for method in _METHODS}
    known = [one for one, scope in asked.items() if any(route.matches(scope)[0] is Match.FULL for route in routes)]
    return ", ".join(known)
