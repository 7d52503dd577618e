"""Routes of the console: the page at `/`, its files, and the list of past questions.

The files are read once, at start, so that no path of a request reaches the file system. They hold no content of a
knowledge base. `SECURITY_HEADERS` make the browser refuse foreign scripts and HTML made from text. Design:
docs/console.md
"""

import asyncio
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from starlette.exceptions import HTTPException

from stillroom.rag.records import RecordSummary
from stillroom.server.auth.tenants import stillroom_of
from stillroom.server.routes.annotations import public_record

PAGE = "index.html"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "font-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}

SECURITY_HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Sent with the page and its files."""


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str


def router() -> APIRouter:
    static = _read_files()
    router = APIRouter()

    async def page(request: Request) -> Response:
        return _respond(request, static[PAGE])

    async def file(name: str, request: Request) -> Response:
        if name == PAGE or name not in static:
            raise HTTPException(404)
        return _respond(request, static[name])

    async def requests(request: Request, limit: Annotated[int, Query(ge=1, le=500)] = 50) -> list[RecordSummary]:
        """List past questions, latest first."""
        return await asyncio.to_thread(stillroom_of(request).records.recent, limit)

    async def one_request(request_id: str, request: Request) -> dict[str, Any]:
        """Return the record of one question."""
        found = await asyncio.to_thread(stillroom_of(request).records.get, request_id)
        return public_record(found)

    router.add_api_route("/", page, methods=["GET", "HEAD"], include_in_schema=False)
    router.add_api_route("/console/{name}", file, methods=["GET", "HEAD"], include_in_schema=False)
    router.add_api_route("/v1/requests", requests, methods=["GET"])
    router.add_api_route("/v1/requests/{request_id}", one_request, methods=["GET"])
    return router


def _respond(request: Request, file: _File) -> Response:
    headers = SECURITY_HEADERS | {"Cache-Control": "no-cache", "ETag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


def _read_files() -> dict[str, _File]:
    found = {}
    for entry in (files(__package__) / "static").iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in _TYPES:
            content = entry.read_bytes()
            found[entry.name] = _File(content, _TYPES[suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found
