"""A server with scripted replies over real sockets: one reply per request, then the connection closes."""

import json
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Reply = bytes | Callable[[socket.socket], None]
"""Bytes to send before the connection closes, or a function of the connection."""


@dataclass
class Asked:
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class ScriptedServer:
    replies: Sequence[Reply]
    asked: list[Asked] = field(default_factory=list)

    def __enter__(self) -> "ScriptedServer":
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self._thread = threading.Thread(target=self._serve, name="scripted-server")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Refuse connections from now on. Idempotent."""
        if self._socket.fileno() < 0:
            return
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._socket.close()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        for reply in self.replies:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(20)
                asked = read_request(connection)
                if asked is None:
                    return
                self.asked.append(asked)
                if callable(reply):
                    reply(connection)
                else:
                    connection.sendall(reply)


def read_request(connection: socket.socket) -> Asked | None:
    received = b""
    while b"\r\n\r\n" not in received:
        more = connection.recv(65536)
        if not more:
            return None
        received += more
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        body += connection.recv(65536)
    return Asked(first.split()[1], headers, json.loads(body) if body else None)


def reply(status: int, content: object, headers: str = "") -> bytes:
    """Return a whole JSON response."""
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\nconnection: close\r\n{headers}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def error(status: int, message: str, headers: str = "") -> bytes:
    return reply(status, {"error": {"message": message, "type": "t", "param": None, "code": None}}, headers)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n\r\n"


def event(content: object) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()


def delta(text: str | None, reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]})


USAGE = event(
    {
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
    }
)
DONE = b"data: [DONE]\n\n"
GOOD = STREAM_HEAD + delta("Twice ") + delta("a year.") + delta(None, "stop") + USAGE + DONE
