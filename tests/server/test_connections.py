"""Slow, silent, endless and invalid connections over real sockets."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from stillroom.config.settings import ServerConfig, StillroomConfig
from stillroom.server.limits import connections
from stillroom.server.limits.connections import LimitedProtocol
from tests.server.fakes import NUM_BLOCKS, FakeStillroom, as_stillroom, until
from tests.server.harness import serving

SHORT = {"head_timeout_s": 0.2, "body_timeout_s": 0.2, "write_timeout_s": 0.2}


@contextmanager
def talking(**settings: Any) -> Iterator[tuple[FakeStillroom, Callable[[], socket.socket]]]:
    """Yield a server with short limits, and a function that connects to it."""
    stillroom = FakeStillroom(config=StillroomConfig(server=ServerConfig(**SHORT | settings)))
    opened: list[socket.socket] = []
    with serving(as_stillroom(stillroom)) as url:
        address = urlsplit(url)

        def connect() -> socket.socket:
            connection = socket.create_connection((str(address.hostname), address.port), timeout=20)
            opened.append(connection)
            return connection

        try:
            yield stillroom, connect
        finally:
            for connection in opened:
                connection.close()


def read_all(connection: socket.socket) -> bytes:
    found = b""
    try:
        while piece := connection.recv(65536):
            found += piece
    except ConnectionResetError:
        pass
    return found


def head(path: str = "/v1/search", length: int | None = None, **headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    lines += [] if length is None else [f"content-length: {length}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def request(body: object, path: str = "/v1/search") -> bytes:
    content = json.dumps(body).encode()
    return head(path, len(content)) + content


def is_alive(connect: Callable[[], socket.socket]) -> bool:
    """Whether a request is answered. A delayed one may be cut too: use with `until`."""
    try:
        connection = connect()
        connection.sendall(request({"query": "keys"}))
        return connection.recv(12) == b"HTTP/1.1 200"
    except OSError:
        return False


@pytest.mark.parametrize("sent", [b"", b"POST", b"POST /v1/search HTTP/1.1\r\nhost: localhost\r\nx-slow: "])
def test_slow_head_ends_the_connection(sent: bytes) -> None:
    with talking() as (_, connect):
        connection = connect()
        connection.sendall(sent)
        reply = read_all(connection)
        until(lambda: is_alive(connect))
    if sent:
        assert reply.startswith(b"HTTP/1.1 408") and b'"request_incomplete"' in reply
    else:
        assert reply == b""


def test_slow_body_ends_the_connection() -> None:
    with talking() as (stillroom, connect):
        connection = connect()
        connection.sendall(head("/v1/chat/completions", 1000) + b'{"messages": ')
        reply = read_all(connection)
        until(lambda: is_alive(connect))
    assert reply.startswith(b"HTTP/1.1 408") and b'"request_incomplete"' in reply
    assert not stillroom.asked


def test_single_bytes_do_not_extend_the_head_timeout() -> None:
    with talking() as (_, connect):
        connection = connect()
        connection.sendall(b"GET /healthz HTTP/1.1\r\n")
        connection.settimeout(0.02)
        reply = b""
        for index in range(2000):
            try:
                connection.sendall(f"x-{index}: y\r\n".encode())
                reply += connection.recv(4096)
                if not reply:
                    break
            except TimeoutError:
                continue
            except OSError:
                break
            if reply:
                break
        else:
            pytest.fail("the server waited for ever")
        assert index < 1500


def test_client_that_does_not_read_is_cut_and_frees_its_blocks() -> None:
    with talking() as (stillroom, connect):
        connection = connect()
        question = " ".join(["w" * 900] * 2000)  # returned as 2,000 events of a kilobyte
        body = {"messages": [{"role": "user", "content": question}], "stream": True}
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(request(body, "/v1/chat/completions"))
        until(lambda: len(stillroom.asked) == 1)
        until(lambda: stillroom.num_free_blocks == NUM_BLOCKS)
        until(lambda: is_alive(connect))


def test_unread_reply_does_not_keep_a_closing_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    made, lost, is_lost = LimitedProtocol.connection_made, LimitedProtocol.connection_lost, threading.Event()

    def connection_made(protocol: LimitedProtocol, transport: asyncio.Transport) -> None:
        made(protocol, transport)
        transport.set_write_buffer_limits(high=2**30)  # writing is never paused

    def connection_lost(protocol: LimitedProtocol, error: Exception | None) -> None:
        lost(protocol, error)
        is_lost.set()

    monkeypatch.setattr(LimitedProtocol, "connection_made", connection_made)
    monkeypatch.setattr(LimitedProtocol, "connection_lost", connection_lost)
    with talking() as (stillroom, connect):
        stillroom.texts["docs/keys.md"] = "x" * 20_000_000
        content = json.dumps({"query": "keys"}).encode()
        connect().sendall(head(length=len(content), connection="close") + content)
        assert is_lost.wait(10), "the connection is never closed"


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("sent", [b"x", b"\r\n", b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"])
def test_disconnect_is_noticed_behind_pipelined_data(sent: bytes, is_stream: bool) -> None:
    with talking(head_timeout_s=20.0) as (stillroom, connect):
        stillroom.gate.clear()
        connection = connect()
        body = {"messages": [{"role": "user", "content": "a b c"}], "stream": is_stream}
        connection.sendall(request(body, "/v1/chat/completions"))
        until(lambda: stillroom.num_free_blocks < NUM_BLOCKS)
        connection.sendall(sent)
        connection.close()
        until(lambda: stillroom.num_free_blocks == NUM_BLOCKS)


def test_pipelined_requests_are_answered_in_order() -> None:
    with talking(head_timeout_s=20.0) as (_, connect):
        connection = connect()
        connection.sendall(b"".join(request({"query": f"{index}" * 3_000}) for index in range(9)))
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        reply = read_all(connection)
    assert reply.count(b"HTTP/1.1 200 OK") == 10
    places = [reply.find(str(index).encode() * 3_000) for index in range(9)]
    assert places == sorted(places) and places[0] > 0


def test_connections_beyond_the_limit_get_503() -> None:
    with talking(max_connections=3, head_timeout_s=20.0) as (_, connect):
        held = [connect() for _ in range(3)]
        for connection in held:
            connection.sendall(b"GET /heal")
        until(lambda: _status_of(connect()) == b"503", 20)
        for connection in held:
            connection.close()
        until(lambda: _status_of(connect()) == b"200", 20)


def _status_of(connection: socket.socket) -> bytes:
    try:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        return read_all(connection)[9:12]
    except OSError:
        return b""
    finally:
        connection.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\xff\xfe nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nhost: other\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 100_000 + b"\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 1_000_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
    ],
    ids=lambda sent: sent[:24].hex(),
)
def test_invalid_http_is_refused_and_the_server_continues(sent: bytes) -> None:
    with talking() as (_, connect):
        connection = connect()
        try:
            connection.sendall(sent)
            reply = read_all(connection)
        except (BrokenPipeError, ConnectionResetError):
            reply = b""  # closed while the client was still sending
        until(lambda: is_alive(connect))
    assert reply == b"" or reply.startswith(b"HTTP/1.1 4"), reply[:200]


CHUNKED = b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("lines", "body", "status"),
    [
        ([b"content-length: 5", b"transfer-encoding: chunked"], CHUNKED, b"400"),
        ([b"transfer-encoding: chunked", b"content-length: 5"], CHUNKED, b"400"),
        ([b"content-length: 5", b"content-length: 6"], b"hello", b"400"),
        ([b"content-length: 5, 6"], b"hello", b"400"),
        ([b"content-length: +5"], b"hello", b"400"),
        ([b"transfer-encoding: gzip, chunked"], CHUNKED, b"501"),
        ([b"transfer-encoding: chunked", b"transfer-encoding: chunked"], CHUNKED, b"501"),
        ([b"authorization: Bearer a", b"authorization: Bearer b"], b"", b"400"),
        ([b"x-folded: a", b" b"], b"", b"400"),
        ([b"x-bare: a\ncontent-length: 5"], b"hello", b"400"),
        ([b"x-space : a"], b"", b"400"),
        ([b"x-%d: y" % number for number in range(200)], b"", b"431"),
        ([b"x-large: " + b"y" * 70_000], b"", b"431"),
    ],
    ids=lambda value: b" ".join(value)[:40].decode() if isinstance(value, list) else "",
)
def test_ambiguous_http_is_refused_and_the_connection_closed(
    lines: list[bytes], body: bytes, status: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "stillroom.server.access")
    sent = b"\r\n".join([b"POST /v1/search HTTP/1.1", b"host: localhost", *lines, b"", body])
    with talking(head_timeout_s=20.0) as (_, connect):
        connection = connect()
        connection.sendall(sent + b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        reply = read_all(connection)
        until(lambda: is_alive(connect))

    assert reply.startswith(b"HTTP/1.1 " + status), reply[:200]
    assert reply.count(b"HTTP/1.1 ") == 1, "pipelined data must not be answered"
    head, _, content = reply.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower() and b"x-request-id: " in head.lower()
    assert json.loads(content)["error"]["code"] == "invalid_http"
    refused = [record for record in caplog.records if "- other " + status.decode() in record.getMessage()]
    assert len(refused) == 1


def test_transfer_encoding_in_http_1_0_is_refused() -> None:
    with talking(head_timeout_s=20.0) as (_, connect):
        connection = connect()
        connection.sendall(b"POST /v1/search HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKED)
        assert read_all(connection).startswith(b"HTTP/1.1 400")


def test_second_request_on_a_connection_is_checked_too() -> None:
    bad = b"POST /v1/search HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
    with talking(head_timeout_s=20.0) as (_, connect):
        connection = connect()
        connection.sendall(request({"query": "keys"}) + bad + CHUNKED + request({"query": "keys"}))
        reply = read_all(connection)

    assert re.findall(rb"HTTP/1.1 (\d+)", reply) == [b"200", b"400"]


def test_body_of_a_refused_request_does_not_keep_the_connection() -> None:
    with talking() as (_, connect):
        connection = connect()
        connection.sendall(head("/nowhere", 10_000_000) + b"x" * 1000)
        assert read_all(connection).startswith(b"HTTP/1.1 404")


def test_reply_before_the_whole_request_is_not_lost_by_a_reset() -> None:
    with talking(max_body_bytes=1000, body_timeout_s=20.0) as (_, connect):
        connection = connect()
        connection.sendall(head("/v1/search", 100_000))
        reply = b""
        while piece := connection.recv(65536):  # until the server has ended its side
            reply += piece
        for _ in range(3):
            connection.sendall(b"x" * 1000)  # a closed connection would answer with a reset

        assert reply.startswith(b"HTTP/1.1 413") and reply.endswith(b"}")
        assert connection.recv(1) == b""


def test_client_that_goes_on_sending_after_its_reply_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_LINGER_S", 0.05)
    with talking(max_body_bytes=1000, body_timeout_s=20.0) as (_, connect):
        connection = connect()
        connection.sendall(head("/v1/search", 100_000))
        assert read_all(connection).startswith(b"HTTP/1.1 413")

        def is_closed() -> bool:
            try:
                connection.sendall(b"x")
            except OSError:
                return True
            return False

        until(is_closed)
