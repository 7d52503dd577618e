"""Engines with scripted answers over real sockets. Whichever engine is asked for answers gives the next reply."""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qs, urlsplit

from stillroom.cluster.wire import MEDIA_TYPE, AnswerRequest, WireEvent, events_to_json
from stillroom.cluster.wire_state import EngineInfo, EngineState
from tests.engine.scripted import Asked, read_request, reply

STREAM = f"HTTP/1.1 200 OK\r\ncontent-type: {MEDIA_TYPE}\r\nconnection: close\r\n\r\n".encode()

Answer = bytes | Callable[[socket.socket], None]
"""Bytes to send before the connection closes, or a function of the connection."""


def line(*events: WireEvent) -> bytes:
    return json.dumps(events_to_json(events)).encode() + b"\n"


def refusal(status: int, message: str = "no", code: str | None = None, headers: str = "") -> bytes:
    return reply(status, {"error": {"message": message, "type": "t", "param": None, "code": code}}, headers)


@dataclass
class Script:
    """What engines reply to requests for answers, in turn, and what they were asked."""

    answers: list[Answer]
    asked: list[AnswerRequest] = field(default_factory=list)
    by: list[str] = field(default_factory=list)
    """Address of the engine that each request was sent to."""


class WireEngine:
    """One engine; a thread for each connection."""

    def __init__(self, script: Script, info: EngineInfo) -> None:
        self.info: EngineInfo | bytes = info
        """Bytes: the whole reply."""
        self.state = EngineState(run=info.run, sequence=1, is_all=True)
        self.secrets: list[str] = []
        self.sharing: set[str] = set()
        """Addresses of the engines that share the documents, as a front told last."""
        self.is_used = threading.Event()
        """Set when a front that has its state asks for the next."""
        self.waits_for: threading.Event | None = None
        """Its information is told after this."""
        self._script = script
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._serve, name="wire-engine")]
        self._threads[0].start()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._socket.close()
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()

    def start_again(self, run: str, **changed: object) -> None:
        """Answer as another start of the engine does."""
        assert isinstance(self.info, EngineInfo)
        self.info = replace(self.info, run=run, **changed)  # type: ignore[arg-type]
        self.state = replace(self.state, run=run)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._reply, args=(connection,), name="wire-connection"))
            self._threads[-1].start()

    def _reply(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(20)
            asked = read_request(connection)
            if asked is None:
                return
            self.secrets.append(asked.headers.get("authorization", ""))
            found = self._answer(asked)
            if callable(found):
                found(connection)
            else:
                connection.sendall(found)

    def _answer(self, asked: Asked) -> Answer:
        if asked.path.startswith("/engine/v1/info"):
            if self.waits_for is not None:
                self.waits_for.wait(20)
            return self.info if isinstance(self.info, bytes) else reply(200, self.info.to_json())
        if asked.path.startswith("/engine/v1/state"):
            told = parse_qs(urlsplit(asked.path).query)
            self.sharing = set(told["engines"][0].split(",")) if "engines" in told else set()
            if "since=0" not in asked.path:
                self.is_used.set()
            return reply(200, self.state.to_json())
        assert asked.path == "/engine/v1/answers"
        self._script.asked.append(AnswerRequest.from_json(asked.body))
        self._script.by.append(self.url)
        return self._script.answers.pop(0)


@contextmanager
def wire_engines(
    answers: Sequence[Answer], info: EngineInfo, number: int = 2
) -> Iterator[tuple[list[WireEngine], Script]]:
    script = Script(list(answers))
    engines = [WireEngine(script, replace(info, run=f"run-{index}")) for index in range(number)]
    try:
        yield engines, script
    finally:
        for engine in engines:
            engine.close()
