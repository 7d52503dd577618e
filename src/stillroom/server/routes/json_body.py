"""Strict parsing of JSON bodies: only valid text and finite numbers reach the routes.

Python's parser accepts more than the format allows (NaN, duplicate keys, lone surrogates), and its own limits raise
errors of many kinds.
"""

import json
import math
from asyncio import to_thread
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from stillroom.server.error_replies import Refused

MAX_DEPTH = 100
"""Most levels of nested objects and arrays."""
MAX_KEYS = 4096
"""Most keys of one object; validation makes an error for each wrong key."""

_LARGE = 128 * 1024
"""Bodies of at least this many bytes are parsed in a thread, so that the event loop is not blocked."""


class JsonRoute(APIRoute):
    """A route whose body, if any, is JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def read_and_handle(request: Request) -> Response:
            _check_content_type(request)
            body = await request.body()
            parsed = await to_thread(parse, body) if len(body) >= _LARGE else parse(body)
            return await handle(_Parsed(request, body, parsed))

        return read_and_handle


class _Parsed(Request):
    def __init__(self, request: Request, body: bytes, parsed: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._body = body
        self._parsed = parsed

    async def json(self) -> Any:
        return self._parsed


def parse(body: bytes) -> Any:
    """Return the value of a JSON body.

    Raises:
        Refused: the body is not valid JSON, or holds something else than valid text and finite numbers.
    """
    try:
        parsed = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise _refused(f"it is not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise _refused(f"{error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise _refused(f"it is nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:  # a number of thousands of digits
        raise _refused(str(error).partition(";")[0]) from error
    _check(parsed)
    return parsed


def _check(parsed: Any) -> None:
    level = [parsed]
    for _ in range(MAX_DEPTH + 1):
        inside: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inside += value.keys()
                inside += value.values()
            elif isinstance(value, list):
                inside += value
            elif isinstance(value, float) and not math.isfinite(value):
                raise _refused("a number is too large for a 64-bit float")
            elif isinstance(value, str) and not value.isascii() and not _is_text(value):
                raise _refused("a text has a lone surrogate")
        if not inside:
            return
        level = inside
    raise _refused(f"it is nested deeper than {MAX_DEPTH} levels")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise _refused(f"an object has more than {MAX_KEYS} keys")
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _refused(f"the key {twice[:80]!r} occurs twice in one object")
    return found


def _refuse_constant(name: str) -> None:
    raise _refused(f"{name} is not a number in JSON")


def _refused(reason: str) -> Refused:
    return Refused(400, "invalid_json", f"the body is not valid JSON: {reason}")


def _check_content_type(request: Request) -> None:
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    main, _, sub = kind.partition("/")
    if main != "application" or not (sub == "json" or sub.endswith("+json")):
        said = f"not {kind[:80]!r}" if kind else "and the request has no Content-Type"
        raise Refused(
            415, "unsupported_media_type", f"the body must be JSON with Content-Type: application/json, {said}"
        )
