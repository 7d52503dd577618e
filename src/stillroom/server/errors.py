"""Errors as HTTP: a status and OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`. No stack traces."""

import logging
import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.routing import Match

from stillroom.errors import (
    ChangeCancelledError,
    CorruptKnowledgeBaseError,
    DeadlineExceededError,
    DeviceLostError,
    EmptyKnowledgeBaseError,
    EngineClosedError,
    EngineRefusedError,
    EngineUnavailableError,
    IndexUnavailableError,
    KnowledgeBaseBusyError,
    KnowledgeBaseNotFoundError,
    NonFiniteError,
    NothingFoundError,
    PromptTooLongError,
    QueueFullError,
    RequestAbortedError,
    RequestTimeoutError,
    StillroomError,
    StorageError,
    UnknownDocumentError,
    UnknownRequestError,
    UsageError,
)
from stillroom.server.privacy import without_folders

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""What nginx made the usual status for a client that did not wait; nobody receives it, but the metrics count it."""

FAILED_WITH = "failed_with"
"""In the scope's state: the status of the error that a stream ended in, whose own status was sent before."""

LATER = {"retry-after": "5"}
"""Of what is not possible now, where nobody knows when it will be."""

_METHODS = ("DELETE", "GET", "HEAD", "POST")
"""Of all routes."""
_INVALID = "invalid_request_error"
_UNAVAILABLE = "service_unavailable_error"

_INTERNAL = "internal error; the server's log has the details"

_KINDS: tuple[tuple[type[StillroomError], int, str, str, str | None], ...] = (
    # exception, status, type, code, message; the first that fits, so a subclass stands before its base. Without a
    # message the exception's own is for the caller; the others may name paths of the server, and are for its log
    (PromptTooLongError, 400, _INVALID, "context_length_exceeded", None),
    (UnknownDocumentError, 404, _INVALID, "document_not_found", None),
    (UnknownRequestError, 404, _INVALID, "request_not_found", None),
    (UsageError, 400, _INVALID, "invalid_value", None),
    (EmptyKnowledgeBaseError, 409, "conflict_error", "knowledge_base_empty", None),
    (NothingFoundError, 404, _INVALID, "nothing_found", None),
    (ChangeCancelledError, 409, "conflict_error", "upload_cancelled", None),
    (
        KnowledgeBaseNotFoundError,
        503,
        _UNAVAILABLE,
        "knowledge_base_gone",
        "the folder of this knowledge base is gone; its operator finds the details in the server's log",
    ),
    (
        KnowledgeBaseBusyError,
        503,
        _UNAVAILABLE,
        "knowledge_base_busy",
        "another process is writing to this knowledge base; try again in a moment",
    ),
    (
        IndexUnavailableError,
        503,
        _UNAVAILABLE,
        "index_unavailable",
        "the server that holds the vectors cannot be reached or refuses; try again later, or search with mode sparse",
    ),
    (
        StorageError,
        507,
        "server_error",
        "storage_failed",
        "the disk of this knowledge base is full or failing; what was stored before is safe. Its operator finds the "
        "details in the server's log",
    ),
    (
        CorruptKnowledgeBaseError,
        500,
        "server_error",
        "knowledge_base_damaged",
        "{part} of this knowledge base is damaged; its operator finds what to do in the server's log, and with "
        "`stillroom verify`",
    ),
    (EngineClosedError, 503, _UNAVAILABLE, "shutting_down", None),
    (DeviceLostError, 503, _UNAVAILABLE, "device_lost", None),
    (QueueFullError, 429, "rate_limit_error", "queue_full", None),
    (DeadlineExceededError, 504, "timeout_error", "deadline_exceeded", None),
    (RequestTimeoutError, 504, "timeout_error", "request_timeout", None),
    (EngineUnavailableError, 503, _UNAVAILABLE, "engine_unavailable", None),
    (EngineRefusedError, 502, "bad_gateway_error", "engine_refused", None),
    (RequestAbortedError, 503, _UNAVAILABLE, "request_aborted", None),
    (NonFiniteError, 500, "server_error", "non_finite", None),
    (StillroomError, 500, "server_error", "internal_error", _INTERNAL),
)


def error_body(message: str, kind: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Refused(Exception):
    """A request that a route cannot take. Never leaves the application."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def model_not_served(model: str, served: list[str]) -> Refused:
    """The request names a model that this server does not have."""
    message = f"the model {model!r} is not served here; this server has {', '.join(map(repr, served))}"
    return Refused(404, "model_not_found", message, "model")


def describe(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Status and body. What is not ours is an internal error, and its message stays in the server's log; whoever caught
    it writes it there. Ours whose messages are not for the caller are written here."""
    for exception, status, kind, code, message in _KINDS:
        if isinstance(error, exception):
            if message is None:
                return status, error_body(without_folders(str(error)), kind, code=code)
            logger.log(logging.WARNING if status == 503 else logging.ERROR, "%s", error)
            return status, error_body(message.format(part=getattr(error, "part", "")), kind, code=code)
    return 500, error_body(_INTERNAL, "server_error", code="internal_error")


def error_response(error: BaseException) -> JSONResponse:
    status, body = describe(error)
    # OpenAI's clients repeat requests that got 408, 409, 429 or 5xx, unless told that it will not help
    headers = {} if status in (429, 503) else {"x-should-retry": "false"}
    if status == 503:
        headers |= LATER
    if isinstance(error, QueueFullError):
        headers["retry-after"] = str(math.ceil(error.retry_after_seconds))
    return JSONResponse(body, status_code=status, headers=headers)


def install(app: FastAPI) -> None:
    """Answer every expected error of the app in this shape."""

    async def on_stillroom_error(_: Request, error: Exception) -> JSONResponse:
        return error_response(error)

    async def on_refused(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, Refused)
        body = error_body(str(error), _INVALID, code=error.code, param=error.param)
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
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    message = first["msg"].removeprefix("Value error, ")
    body = error_body(f"{param}: {message}" if param else message, _INVALID, code="invalid_value", param=param or None)
    return JSONResponse(body, status_code=400)


def _http_exception(request: Request, error: HTTPException) -> JSONResponse:
    where = f"{request.method} {request.url.path}"
    message, code = {
        404: (f"there is no {where}", "not_found"),
        405: (f"{where} is not possible; see the Allow header", "method_not_allowed"),
        413: (str(error.detail), "body_too_large"),
    }.get(error.status_code, (str(error.detail), None))
    body = error_body(message, _INVALID, code=code)
    headers = {"allow": _methods_of(request)} if error.status_code == 405 else error.headers
    return JSONResponse(body, status_code=error.status_code, headers=headers)


def _methods_of(request: Request) -> str:
    """All that a path knows: each method has a route of its own, and Starlette tells of the first only."""
    routes = request.app.router.routes
    asked = {method: {**request.scope, "method": method} for method in _METHODS}
    known = [one for one, scope in asked.items() if any(route.matches(scope)[0] is Match.FULL for route in routes)]
    return ", ".join(known)
