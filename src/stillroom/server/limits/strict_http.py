"""Strict HTTP/1.1 parsing: refuses input that a proxy and this server could read as different requests.

Refused, and the connection closed after the reply (RFC 9112):

- `Content-Length` together with `Transfer-Encoding` (6.1), and `Transfer-Encoding` in HTTP/1.0;
- a head with a bare line feed (2.2) or a folded header (5.2);
- a head of more than MAX_HEAD_BYTES, or with more than MAX_HEADERS headers;
- more than one `Authorization` or `Origin`, because a proxy may have checked another one than this server.

h11 itself refuses different values of `Content-Length`, several `Host` or `Transfer-Encoding` headers, and malformed
headers.
"""

import re
from dataclasses import dataclass
from typing import Any

import h11

MAX_HEAD_BYTES = 64 * 1024
"""Most bytes of a request line and its headers."""
MAX_HEADERS = 100
_ONCE = (b"authorization", b"origin")
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")
_FOLD = re.compile(rb"\n[ \t]")


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reply with which a connection is closed."""

    status: int
    message: str


_INVALID = Refusal(400, "this is not a valid HTTP request")
_TOO_LARGE = Refusal(431, f"the request's head exceeds {MAX_HEAD_BYTES} bytes")
_NOT_IMPLEMENTED = Refusal(501, "the only transfer coding supported is a single `chunked`")
_OF_H11 = {431: _TOO_LARGE, 501: _NOT_IMPLEMENTED}


class StrictConnection(h11.Connection):
    """The server's side of one connection."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.refusal = _INVALID
        """Valid once `next_event` has raised RemoteProtocolError."""

    def next_event(self) -> Any:
        """Return h11's next event. Raises RemoteProtocolError for everything that is refused."""
        try:
            if self.their_state is h11.IDLE:
                self._refuse_if(_problem_of_head(self.trailing_data[0]))
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if self.refusal is _INVALID:
                self.refusal = _OF_H11.get(error.error_status_hint, _INVALID)
            raise
        if isinstance(event, h11.Request):
            self._refuse_if(_problem_of_request(event))
        return event

    def _refuse_if(self, problem: Refusal | None) -> None:
        if problem is not None:
            self.refusal = problem
            raise h11.RemoteProtocolError(problem.message, error_status_hint=problem.status)


def _problem_of_head(received: bytes) -> Refusal | None:
    end = _END_OF_HEAD.search(received)
    if end is None:
        return None  # h11 limits the size of an incomplete head
    if end.end() > MAX_HEAD_BYTES:
        return _TOO_LARGE
    head = received[: end.end()]
    if _BARE_LINE_FEED.search(head):
        return Refusal(400, "the request's head has a line that does not end in CR LF")
    if _FOLD.search(head):
        return Refusal(400, "the request has a folded header")
    return None


def _problem_of_request(request: h11.Request) -> Refusal | None:
    names = [name for name, _ in request.headers]
    if len(names) > MAX_HEADERS:
        return Refusal(431, f"the request has more than {MAX_HEADERS} headers")
    if b"transfer-encoding" in names and b"content-length" in names:
        return Refusal(400, "the request has both Content-Length and Transfer-Encoding")
    if b"transfer-encoding" in names and request.http_version < b"1.1":
        return Refusal(400, "Transfer-Encoding needs HTTP/1.1")
    for name in _ONCE:
        if names.count(name) > 1:
            return Refusal(400, f"the request has more than one {name.decode().title()} header")
    return None
