"""The body of an upload: a multipart form with files, or texts in JSON."""

import asyncio
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException

from stillroom.errors import StorageError
from stillroom.server.error_replies import Refused
from stillroom.server.routes.json_body import parse
from stillroom.server.schemas.requests import MAX_DOCUMENTS, DocumentsRequest

_FILES = {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1, "maxItems": MAX_DOCUMENTS}
_METADATA = {"type": ["object", "null"], "description": "Metadata of all files, as JSON."}
FORMS = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"file": _FILES, "metadata": _METADATA},
                    "required": ["file"],
                },
                "encoding": {"metadata": {"contentType": "application/json"}},
            },
            "application/json": {"schema": {"$ref": "#/components/schemas/DocumentsRequest"}},
        },
    }
}
"""Both forms of the body, for the OpenAPI document."""


@dataclass(frozen=True, slots=True)
class Upload:
    files: Sequence[tuple[str, BinaryIO]]
    metadata: Mapping[str, Any] | None

    def close(self) -> None:
        for _, stream in self.files:
            stream.close()


def size_of(request: Request, max_bytes: int) -> int:
    """Return the largest size in bytes that the body can have."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() and "transfer-encoding" not in request.headers else max_bytes


async def read_upload(request: Request) -> Upload:
    """Read a form or JSON.

    Raises:
        Refused, RequestValidationError: the body is neither, or has no files.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        content = b"".join(
            [piece async for piece in request.stream()]
        )  # unlike request.body(), not kept in memory by the request
        return await asyncio.to_thread(_parse_upload, content)
    if kind == "multipart/form-data":
        return await _read_form(request)
    message = "send documents as multipart/form-data with files, or as application/json"
    raise Refused(415, "unsupported_media_type", message)


def _parse_upload(content: bytes) -> Upload:
    try:
        body = DocumentsRequest.model_validate(parse(content))
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False, include_context=False)) from error
    files = [(document.name, io.BytesIO(document.text.encode())) for document in body.documents]
    return Upload(files, body.metadata)


async def _read_form(request: Request) -> Upload:
    _check_charset(request.headers["content-type"])
    try:
        form = await request.form(max_files=MAX_DOCUMENTS, max_fields=1)
    except OSError as error:
        raise StorageError(f"the upload cannot be written to a temporary file: {error.strerror or error}") from error
    except (HTTPException, MultiPartException, UnicodeError) as error:
        if getattr(error, "status_code", 400) == 413:
            raise
        raise Refused(400, "invalid_form", f"the form cannot be read: {getattr(error, 'detail', error)}") from error
    try:
        files = [(one.filename or "", one.file) for one in form.getlist("file") if isinstance(one, UploadFile)]
        said = form.get("metadata")
        if len(files) + (said is not None) < len(form.multi_items()) or not files:
            message = "send each file as a part named 'file', and at most one other part, 'metadata', a JSON object"
            raise Refused(400, "invalid_value", message, "file")
        metadata = parse(said.encode(errors="surrogatepass")) if isinstance(said, str) else None
        if not isinstance(metadata, dict | None):
            raise Refused(400, "invalid_value", "metadata: must be a JSON object", "metadata")
        return Upload(files, metadata)
    except BaseException:
        await form.close()
        raise


def _check_charset(content_type: str) -> None:
    """Refuse a form whose names are not UTF-8; Python also has codecs such as `unicode_escape`."""
    charset = parse_options_header(content_type)[1].get(b"charset", b"utf-8")
    if charset.lower() not in (b"utf-8", b"utf8", b"us-ascii"):
        raise Refused(400, "invalid_form", "the form cannot be read: send it with charset=utf-8")
