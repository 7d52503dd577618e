"""Time limits of one connection, so that slow or idle clients do not hold up the server.

- A request's head must arrive within `head_timeout_s`, its body within `body_timeout_s` after that. Slow senders
  (slowloris) and silent connections are closed.
- Replies go through a buffer of 64 KiB. While it is full, no more of the reply is produced. If the client has not read
  most of it within `write_timeout_s`, the connection is cut and its request cancelled. The same limit holds for the
  last reply of a closing connection.
- While a request runs, its connection is still read, so that a disconnect is noticed.
- A reply that comes before the whole request ends only the server's side of the connection; what the client still sends
  is read and thrown away for `_LINGER_S`. Closing at once would reset the connection, and the client could lose the
  reply (RFC 9112, section 9.6).
- Connections beyond `max_connections` get 503; beyond twice as many they are cut.
- Ambiguous HTTP is refused and the connection closed (`strict_http`).

Replies sent here have the same form, id and log line as all others. Uvicorn provides everything else.
"""

import asyncio
import uuid
from dataclasses import dataclass
from typing import Any

import h11
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from stillroom.config.settings import ServerConfig
from stillroom.server.error_replies import error_body
from stillroom.server.limits.strict_http import StrictConnection
from stillroom.server.middleware import log_refused

_MAX_AHEAD = 16 * 1024
"""Bytes of later requests that are read while one runs."""
_LINGER_S = 2.0
"""Seconds for a client to read a reply that came before its request was complete."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    head_timeout_s: float
    body_timeout_s: float
    write_timeout_s: float
    max_connections: int

    @classmethod
    def of(cls, config: ServerConfig) -> "ConnectionLimits":
        return cls(config.head_timeout_s, config.body_timeout_s, config.write_timeout_s, config.max_connections)


def protocol_of(limits: ConnectionLimits) -> type[H11Protocol]:
    """Return uvicorn's protocol class with these limits."""

    class Limited(LimitedProtocol):
        pass

    Limited.limits = limits
    return Limited


class LimitedProtocol(H11Protocol):
    """Uvicorn's HTTP/1.1 protocol with time limits and strict parsing."""

    limits: ConnectionLimits
    conn: StrictConnection
    _stage: str | None = None
    _timer: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None
    _closing: asyncio.TimerHandle | None = None
    lingering: asyncio.TimerHandle | None = None
    """Closes a connection of which this side has ended."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_StagedTransport(transport, self))  # type: ignore[arg-type]
        self.conn = StrictConnection()
        if len(self.connections) > 2 * self.limits.max_connections:
            transport.abort()
        elif len(self.connections) > self.limits.max_connections:
            self.app = _reject_connection
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._writing, self._closing, self.lingering):
            if timer is not None:
                timer.cancel()
        self._timer = self._writing = self._closing = self.lingering = None
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    @property
    def may_receive_more(self) -> bool:
        """Whether the client may still be sending its request."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) <= _MAX_AHEAD:
            self.flow.resume_reading()  # a pipelined request pauses it
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._cut_later()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._cut_later()

    def send_400_response(self, msg: str) -> None:
        """Reply to invalid HTTP, in the form of all other errors."""
        refusal = self.conn.refusal
        body = JSONResponse(error_body(refusal.message, "invalid_request_error", code="invalid_http")).body
        try:
            self._send_alone(refusal.status, bytes(body))
        except h11.LocalProtocolError:  # in the middle of a response
            self.transport.abort()

    def _watch(self) -> None:
        """Start the timer of what is expected next: a head, a body, or nothing."""
        if self.transport.is_closing():
            stage = None
        else:
            stage = {h11.IDLE: "head", h11.SEND_BODY: "body"}.get(self.conn.their_state)
        if stage == self._stage:
            return
        self._stage = stage
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if stage is not None:
            seconds = self.limits.head_timeout_s if stage == "head" else self.limits.body_timeout_s
            self._timer = self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.our_state is h11.IDLE and self.conn.their_state is h11.IDLE and self.conn.trailing_data[0] == b"":
            self.transport.close()  # no request has begun
            return
        body = error_body("the request did not arrive in time", "timeout_error", code="request_incomplete")
        try:
            if self.cycle is not None and not self.cycle.response_complete:
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self._send_alone(408, bytes(JSONResponse(body).body))
        except h11.LocalProtocolError:
            self.transport.abort()

    def _send_alone(self, status: int, body: bytes) -> None:
        http_id = uuid.uuid4().hex
        headers: list[tuple[bytes, bytes]] = [
            (b"x-request-id", http_id.encode()),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        log_refused(status, http_id, self.client)
        self.transport.close()
        self._cut_later()

    def _cut_later(self) -> None:
        """Abort after `write_timeout_s`: closing waits for the client to read, possibly for ever."""
        if self._closing is None:
            self._closing = self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)


class _StagedTransport:
    """A connection's transport, whose first `close` may end only the server's side."""

    def __init__(self, transport: asyncio.Transport, protocol: LimitedProtocol) -> None:
        self._transport = transport
        self._protocol = protocol
        self._is_half_closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._is_half_closed or self._transport.is_closing()

    def close(self) -> None:
        """Close the connection. If its client may still be sending, flush, end this side, and close when the client
        has closed or `_LINGER_S` later; a second call closes at once."""
        if self.is_closing() or not self._protocol.may_receive_more or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._is_half_closed = True
        try:
            self._transport.write_eof()
        except OSError:  # the client has gone
            self._transport.close()
            return
        self._transport.resume_reading()
        self._protocol.lingering = self._protocol.loop.call_later(_LINGER_S, self._transport.close)


async def _reject_connection(scope: Scope, receive: Receive, send: Send) -> None:
    body: dict[str, Any] = error_body(
        "too many connections; try again in a moment", "service_unavailable_error", code="too_many_connections"
    )
    headers = {"retry-after": "1", "connection": "close", "x-request-id": uuid.uuid4().hex}
    log_refused(503, headers["x-request-id"], scope.get("client"))
    await JSONResponse(body, status_code=503, headers=headers)(scope, receive, send)
