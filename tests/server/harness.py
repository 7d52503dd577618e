"""Runs a real server on a free port, in a thread, during a `with` block."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx

from stillroom.server.app import create_app
from stillroom.server.run import HttpServer

if TYPE_CHECKING:
    from stillroom.rag.stillroom import Stillroom

DETAILS = (
    "highlight",
    "confidence",
    "warnings",
    "timing",
    "reuse",
    "speculation",
    "lookup",
    "citations",
    "hops",
    "route",
)
"""Fields of `stillroom` that report an answer."""
QUESTION = {"messages": [{"role": "user", "content": "How do I rotate keys?"}]}


@contextmanager
def running(stillroom: "Stillroom", **options: Any) -> Iterator[HttpServer]:
    """Yield a running server, which the test may stop. `stillroom` stays open. Options are those of `create_app`."""
    server = HttpServer("127.0.0.1", 0)
    ready = threading.Event()
    app = create_app(stillroom, **options)
    arguments = (lambda _: app, ready.set, stillroom.config.server)
    thread = threading.Thread(target=server.run, args=arguments, name="test-server")
    thread.start()
    try:
        assert ready.wait(20), "the server did not start"
        yield server
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"


@contextmanager
def serving(stillroom: "Stillroom", **options: Any) -> Iterator[str]:
    """Yield the address of a running server."""
    with running(stillroom, **options) as server:
        yield server.url


def events(response: httpx.Response) -> list[Any]:
    """Return the data of a response's server-sent events."""
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    payloads = [line.removeprefix("data: ") for line in lines]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]
