"""Request ids, the log of requests, and traces."""

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from stillroom.core.clock import VirtualClock
from stillroom.errors import ConfigError
from stillroom.rag.stillroom import Stillroom
from stillroom.server.auth.key_ring import KeyRing
from stillroom.server.middleware import RequestObserver
from stillroom.telemetry.logs import REQUEST_ID, configure_logging
from stillroom.telemetry.metrics import Metrics
from stillroom.telemetry.spans import PHASES, Tracing, current_span, exporting
from tests.server.fakes import FakeStillroom, as_stillroom, until
from tests.server.harness import QUESTION, serving
from tests.server.knowledge import QUESTION as REAL_QUESTION
from tests.server.knowledge import write_knowledge
from tests.server.test_keys import add, bearer

pytestmark = pytest.mark.microworld

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture
def logged(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Logs JSON to stderr, as `serve --json` does."""
    root, access = logging.getLogger(), logging.getLogger("stillroom.server.access")
    level = root.level
    configure_logging("WARNING", as_json=True)
    access.setLevel(logging.INFO)
    yield
    access.setLevel(logging.NOTSET)
    root.setLevel(level)
    for handler in [one for one in root.handlers if type(one).__module__ == "stillroom.telemetry.logs"]:
        root.removeHandler(handler)


def test_plain_request_id_is_kept_and_any_other_replaced(any_client: httpx.Client) -> None:
    for given, is_kept in (
        ("req:1.a_B-c", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("a b", False),
        ("a\tb", False),
    ):
        found = any_client.get("/healthz", headers={"x-request-id": given}).headers["x-request-id"]
        assert (found == given) == is_kept and found
    ids = {any_client.get("/healthz").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


def test_access_log_names_the_caller_and_never_the_content(
    tmp_path: Path, logged: None, capfd: pytest.CaptureFixture[str]
) -> None:
    path, stillroom = tmp_path / "keys.json", FakeStillroom()
    key = add(path, "anna")
    with serving(as_stillroom(stillroom), keys=KeyRing(path)) as url, httpx.Client(base_url=url) as client:
        client.post("/v1/chat/completions", json=QUESTION, headers=bearer(key) | {"x-request-id": "abc"})
        client.get("/secret/path?token=hidden", headers=bearer("sk-stillroom-wrong"))
    capturing = capfd.readouterr().err  # the line is written after the reply
    lines = [json.loads(line) for line in capturing.splitlines() if line.startswith("{")]
    asked, refused = (line for line in lines if line["logger"] == "stillroom.server.access")
    assert (asked["request_id"], asked["caller"], asked["tenant"]) == ("abc", "anna", "default")
    assert (asked["method"], asked["path"], asked["status"]) == ("POST", "/v1/chat/completions", 200)
    assert asked["seconds"] > 0 and asked["time"].endswith("Z")
    assert (refused["path"], refused["status"], refused["caller"]) == ("other", 401, "-")
    for secret in (key, "rotate", "hidden", "wrong", "secret"):
        assert secret not in capturing


def test_polling_of_an_engine_is_not_logged_and_its_refusals_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock, statuses = VirtualClock(), {"/engine/v1/info": 200, "/engine/v1/state": 200, "/engine/v1/answers": 200}

    async def reply(request: Request) -> Response:
        return Response(status_code=statuses[request.url.path])

    routes = [Route(path, reply) for path in statuses]
    transport = httpx.ASGITransport(RequestObserver(Router(routes), Metrics(), clock, routes))

    async def ask(path: str) -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            await client.get(path)

    def logged_by(path: str) -> int:
        caplog.clear()
        asyncio.run(ask(path))
        return len(caplog.records)

    with caplog.at_level(logging.INFO, "stillroom.server.access"):
        assert [logged_by(path) for path in statuses] == [0, 0, 1]
        statuses |= dict.fromkeys(statuses, 401)
        assert [logged_by("/engine/v1/info") for _ in range(3)] == [1, 0, 0]
        clock.advance(61.0)
        assert [logged_by("/engine/v1/info") for _ in range(2)] == [1, 0]
        assert [logged_by("/engine/v1/answers") for _ in range(2)] == [1, 1]
        statuses["/engine/v1/state"] = 500
        assert [logged_by("/engine/v1/state") for _ in range(2)] == [1, 1]


def test_log_records_of_a_request_have_its_id(logged: None, capfd: pytest.CaptureFixture[str]) -> None:
    stillroom = FakeStillroom()
    stillroom.fails_at, stillroom.failure = "How", RuntimeError("a bug")
    with serving(as_stillroom(stillroom)) as url:
        response = httpx.post(f"{url}/v1/chat/completions", json=QUESTION, headers={"x-request-id": "abc"})
    errors = [json.loads(line) for line in capfd.readouterr().err.splitlines() if '"ERROR"' in line]
    assert response.status_code == 500
    assert {line["request_id"] for line in errors} == {"abc"} and "a bug" in errors[0]["traceback"]
    assert REQUEST_ID.get() is None


def test_logged_error_does_not_name_the_document(
    logged: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stillroom = FakeStillroom()
    monkeypatch.setattr(stillroom, "discard", lambda name: 1 / 0)
    with serving(as_stillroom(stillroom)) as url:
        response = httpx.delete(f"{url}/v1/documents/secret.md")
    capturing = capfd.readouterr().err
    assert response.status_code == 500 and "secret" not in capturing
    assert "DELETE /v1/documents/{document:path} failed" in capturing


@pytest.mark.parametrize("is_streamed", [False, True])
def test_answer_has_spans_of_its_phases_below_the_clients_span(tmp_path: Path, is_streamed: bool) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with Stillroom.open(tmp_path / "kb") as stillroom:
        stillroom.add(write_knowledge(tmp_path / "docs"))
        stillroom.warm_up()
        with serving(stillroom, tracing=Tracing(provider)) as url:
            reply = httpx.post(
                f"{url}/v1/chat/completions",
                json={"messages": [{"role": "user", "content": REAL_QUESTION}], "stream": is_streamed},
                headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "abc"},
                timeout=60,
            )
            assert reply.status_code == 200
            until(lambda: len(exporter.get_finished_spans()) == 1 + len(PHASES))
    spans: dict[str, ReadableSpan] = {span.name: span for span in exporter.get_finished_spans()}
    top = spans.pop("POST /v1/chat/completions")
    assert top.parent is not None and top.context is not None and top.attributes is not None
    assert format(top.parent.span_id, "016x") == PARENT
    assert top.attributes["http.response.status_code"] == 200
    assert set(spans) == set(PHASES)
    phases = [spans[name] for name in PHASES]
    for span in phases:
        assert span.context is not None and format(span.context.trace_id, "032x") == TRACE
        assert span.parent is not None and span.parent.span_id == top.context.span_id
        assert span.attributes is not None and span.attributes["gen_ai.usage.output_tokens"] == 2
    for earlier, later in zip(phases, phases[1:], strict=False):
        assert earlier.end_time == later.start_time and earlier.start_time is not None
        assert earlier.start_time <= (earlier.end_time or 0)
    assert top.start_time is not None and phases[0].start_time is not None
    assert current_span() is None


def test_invalid_traceparent_begins_a_new_trace() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with serving(as_stillroom(FakeStillroom()), tracing=Tracing(provider)) as url:
        for parent in ("", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ff-\x7f"):
            assert httpx.get(f"{url}/healthz", headers={"traceparent": parent}).status_code == 200
    assert [span.parent for span in exporter.get_finished_spans()] == [None] * 4


def test_traces_go_to_the_configured_collector() -> None:
    async def collect() -> bytes:
        arrived: asyncio.Queue[bytes] = asyncio.Queue()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            arrived.put_nowait(head)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]

        def make_one() -> None:
            with exporting(f"http://127.0.0.1:{port}") as tracing:
                assert tracing is not None
                with tracing.request("GET", {}):
                    pass

        async with server:
            await asyncio.to_thread(make_one)
            return await asyncio.wait_for(arrived.get(), 20)

    assert asyncio.run(collect()).startswith(b"POST /v1/traces HTTP/1.1")
    with exporting("") as nothing:
        assert nothing is None


def test_missing_trace_libraries_name_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"stillroom\[otel\]"), exporting("http://127.0.0.1:4318"):
        pass
