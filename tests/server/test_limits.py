"""Rate and concurrency limits, admission, readiness and deadlines."""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from stillroom.config.settings import GenerationConfig, RuntimeConfig, ServerConfig, StillroomConfig
from stillroom.core.clock import VirtualClock
from stillroom.errors import DeadlineExceededError, EngineClosedError, PromptTooLongError, QueueFullError
from stillroom.rag.answer import AskOptions
from stillroom.rag.stillroom import Stillroom
from stillroom.server.app import create_app
from stillroom.server.auth.key_ring import KeyRing
from stillroom.server.limits.admission import AdmissionControl
from stillroom.server.limits.draining import Draining
from stillroom.server.limits.rates import Bucket
from stillroom.server.limits.workers import Workers
from tests.server.fakes import FakeStillroom, as_stillroom, until
from tests.server.harness import QUESTION, serving
from tests.server.knowledge import write_knowledge
from tests.server.test_keys import add, bearer

pytestmark = pytest.mark.microworld


def test_stopping_server_tells_once_what_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    for num_running in (0, 3):
        admission = AdmissionControl(1, 0, 0.0, clock)
        admission.num_in_flight = num_running
        draining = Draining(admission, Workers(), lambda: None, 7.0, clock)
        with caplog.at_level(logging.INFO):
            assert [draining.is_over() for _ in range(2)] == [not num_running] * 2
    assert caplog.messages == [
        "stopping: 3 running requests get up to 7 s (server.grace_s); a second Ctrl-C ends them at once"
    ]


@contextmanager
def limited(**settings: Any) -> Iterator[tuple[FakeStillroom, httpx.Client]]:
    stillroom = FakeStillroom(config=StillroomConfig(server=ServerConfig(**settings)))
    with serving(as_stillroom(stillroom)) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield stillroom, client


def ask(client: httpx.Client, **headers: str) -> httpx.Response:
    return client.post("/v1/chat/completions", json=QUESTION, headers=headers)


def test_rate_limit_is_a_token_bucket() -> None:
    bucket = Bucket(60, 60.0, 0.0)
    for _ in range(60):
        bucket.level -= 1
    assert bucket.seconds_to_next == 1.0 and bucket.headers()["x-ratelimit-reset-requests"] == "1m0s"
    bucket.fill(0.5)
    assert (bucket.level, bucket.seconds_to_next) == (0.5, 0.5)
    bucket.fill(1000.0)
    assert bucket.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "60",
        "x-ratelimit-reset-requests": "0ms",
    }


def test_requests_beyond_the_rate_are_429_with_openais_headers() -> None:
    with limited(requests_per_minute=2) as (stillroom, client):
        left = [ask(client).headers["x-ratelimit-remaining-requests"] for _ in range(2)]
        refused = ask(client)
        assert client.get("/v1/models").status_code == 200, "GET requests must not be limited"
        metrics = client.get("/metrics").text
    assert left == ["1", "0"]
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-limit-requests"] == "2"
    assert len(stillroom.asked) == 2
    assert 'stillroom_refused_requests_total{reason="rate"} 1.0' in metrics
    assert 'stillroom_http_requests_total{path="/v1/chat/completions",status="429"} 1.0' in metrics


def test_each_key_has_its_own_limits(tmp_path: Path) -> None:
    path, stillroom = tmp_path / "keys.json", FakeStillroom()
    one, free = add(path, "one", requests_per_minute=1), add(path, "free")
    with serving(as_stillroom(stillroom), keys=KeyRing(path)) as url, httpx.Client(base_url=url) as client:
        assert [ask(client, **bearer(one)).status_code for _ in range(2)] == [200, 429]
        assert [ask(client, **bearer(free)).status_code for _ in range(3)] == [200] * 3


def test_requests_beyond_the_concurrency_limit_are_429() -> None:
    with limited(max_concurrent=2) as (stillroom, client), ThreadPoolExecutor(2) as pool:
        stillroom.gate.clear()
        running = [pool.submit(ask, client) for _ in range(2)]
        until(lambda: len(stillroom.asked) == 2)
        refused = ask(client)
        stillroom.gate.set()
        assert [one.result().status_code for one in running] == [200, 200]
        assert ask(client).status_code == 200, "the limit must apply to running requests only"
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "concurrency_limit_exceeded")


def test_queue_is_bounded_and_readyz_reports_when_it_is_full() -> None:
    config = StillroomConfig(runtime=RuntimeConfig(max_num_seqs=1, max_waiting=1))
    stillroom = FakeStillroom(config=config)
    with serving(as_stillroom(stillroom)) as url, httpx.Client(base_url=url) as client, ThreadPoolExecutor(2) as pool:
        assert client.get("/readyz").json()["status"] == "ready"
        stillroom.gate.clear()
        running = [pool.submit(ask, client) for _ in range(2)]
        until(lambda: len(stillroom.asked) == 2)
        refused, ready = ask(client), client.get("/readyz")
        assert int(ready.headers["retry-after"]) > 0
        stillroom.gate.set()
        assert [one.result().status_code for one in running] == [200, 200]
        assert client.get("/readyz").status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    assert (ready.status_code, ready.json()["checks"]) == (
        503,
        {"model": True, "knowledge_base": True, "device": True, "queue": False, "open": True},
    )


def test_server_without_its_knowledge_base_is_not_ready_and_says_so() -> None:
    stillroom = FakeStillroom()
    stillroom.is_removed = True
    with serving(as_stillroom(stillroom)) as url:
        ready = httpx.get(f"{url}/readyz").json()
    assert (ready["checks"]["model"], ready["checks"]["knowledge_base"]) == (True, False)
    assert ready["reasons"] == ["the knowledge base was removed or replaced; restart the server"]


def test_outage_of_the_database_is_in_healthz_and_the_server_stays_ready() -> None:
    stillroom = FakeStillroom()
    with serving(as_stillroom(stillroom)) as url:
        assert "database" not in httpx.get(f"{url}/healthz").json()
        stillroom.is_shared = True
        assert httpx.get(f"{url}/healthz").json()["database"] == {"answers": False, "copy_age_s": 12.3}
        assert httpx.get(f"{url}/readyz").status_code == 200


def test_server_without_its_model_is_alive_but_not_ready() -> None:
    stillroom = FakeStillroom()
    stillroom.is_closed = True
    with serving(as_stillroom(stillroom)) as url:
        assert httpx.get(f"{url}/healthz").status_code == 200
        ready = httpx.get(f"{url}/readyz").json()
    assert ready["checks"]["model"] is False
    assert ready["reasons"] == ["the model is not loaded, or its engine failed"]


def test_admission_refuses_requests_that_would_wait_too_long() -> None:
    clock = VirtualClock()
    admission = AdmissionControl(2, 100, 10.0, clock)
    for _ in range(8):  # no pace is known yet: four times the slots
        admission.enter("a")
    with pytest.raises(QueueFullError):
        admission.enter("a")
    for _ in range(8):  # one every two seconds
        clock.advance(2.0)
        admission.leave("a", was_served=True)
    assert admission.num_admitted == 0
    for _ in range(2 + 5):  # two run, and five wait up to ten seconds
        admission.enter("a")
    with pytest.raises(QueueFullError, match="max_wait_s") as refused:
        admission.enter("a")
    assert refused.value.retry_after_seconds == pytest.approx(2.0)
    admission.leave("a", was_served=False)
    admission.enter("a")
    admission.is_closing = True
    with pytest.raises(EngineClosedError):
        admission.enter("b")


def test_tenant_below_its_share_is_admitted_when_slots_are_full() -> None:
    admission = AdmissionControl(4, 8, 0.0, VirtualClock())

    def num_let_in(tenant: str) -> int:
        for count in range(100):
            try:
                admission.enter(tenant)
            except QueueFullError:
                return count
        pytest.fail("there is no end")

    assert [num_let_in(tenant) for tenant in "abc"] == [12, 6, 4]
    assert admission.problem() is not None
    for _ in range(12):
        admission.leave("a", was_served=True)
    assert num_let_in("a") == 4


def test_refusals_of_the_engine_are_counted() -> None:
    with limited() as (stillroom, client):
        stillroom.fails_at, stillroom.failure = "rotate", QueueFullError("too many wait", 1.0)
        assert ask(client).status_code == 429
        assert 'stillroom_refused_requests_total{reason="queue"} 1.0' in client.get("/metrics").text


def test_incomplete_bodies_take_no_slots() -> None:
    config = StillroomConfig(runtime=RuntimeConfig(max_num_seqs=1, max_waiting=1))
    stillroom = FakeStillroom(config=config)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with serving(as_stillroom(stillroom)) as url, httpx.Client(base_url=url) as client, contextlib.ExitStack() as stack:
        for _ in range(8):
            held = stack.enter_context(socket.create_connection(("127.0.0.1", client.base_url.port or 0)))
            held.sendall(head + b"expect: 100-continue\r\ncontent-length: 100\r\n\r\n")
            assert held.recv(12) == b"HTTP/1.1 100", "the server must wait for the body"
        assert client.get("/readyz").status_code == 200
        assert ask(client).status_code == 200


def test_only_completed_answers_count_towards_the_pace() -> None:
    config = StillroomConfig(runtime=RuntimeConfig(max_num_seqs=1), server=ServerConfig(max_wait_s=1e-9))
    stillroom = FakeStillroom(config=config)
    app = create_app(as_stillroom(stillroom))
    admission: AdmissionControl = app.state.admission

    def num_let_in() -> int:
        """Return the number of requests admitted at once: 1 if a pace is known, which is slower than the limit."""
        count = 0
        while admission.problem() is None:
            admission.enter("anna")
            count += 1
        for _ in range(count):
            admission.leave("anna", was_served=False)
        return count

    async def many() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            found = []
            await client.post("/v1/search", json={"query": "keys"})
            await client.post("/v1/embeddings", json={"input": "keys"})
            await client.delete("/v1/documents/keys.md")
            found.append(num_let_in())
            stillroom.fails_at = "rotate"
            await client.post("/v1/chat/completions", json=QUESTION | {"stream": True})
            found.append(num_let_in())
            stillroom.fails_at = ""
            await client.post("/v1/chat/completions", json=QUESTION | {"stream": True})
            return [*found, num_let_in()]

    assert asyncio.run(many()) == [4, 4, 1]
    assert admission.num_admitted == admission.num_in_flight == 0


@pytest.mark.parametrize("has_length", [True, False])
def test_too_large_body_is_refused_with_and_without_a_length(has_length: bool) -> None:
    with limited(max_body_bytes=1000) as (stillroom, client):
        content = b'{"messages": "' + b"x" * 5000 + b'"}'
        body: Any = content if has_length else iter([content[:3000], content[3000:]])
        response = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert client.post("/v1/search", json={"query": "x" * 900}).status_code == 200
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert not stillroom.asked


@pytest.fixture(scope="module")
def limited_kb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stillroom]:
    """A Stillroom with the bundled model and a prompt limit."""
    folder = tmp_path_factory.mktemp("limited_kb")
    config = StillroomConfig(generation=GenerationConfig(max_prompt_tokens=120))
    with Stillroom.open(folder / "kb", config=config) as stillroom:
        stillroom.add(write_knowledge(folder / "docs"))
        yield stillroom


def test_deadline_includes_the_search(limited_kb: Stillroom, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of the late search is dropped."""
    go_on, search = threading.Event(), limited_kb._search.search_staged

    def slow(*arguments: Any) -> Any:
        go_on.wait(20)
        return search(*arguments)

    async def ask_in_a_hurry() -> None:
        try:
            with pytest.raises(DeadlineExceededError):
                await limited_kb.astream("Which company employed Dola Kenric ?", AskOptions(deadline_seconds=0.05))
        finally:
            go_on.set()

    limited_kb.ask("Who ?")
    monkeypatch.setattr(limited_kb._search, "search_staged", slow)
    asyncio.run(ask_in_a_hurry())
    until(lambda: limited_kb.num_free_blocks == limited_kb.num_blocks)


@pytest.mark.parametrize("is_chat", [True, False])
def test_deadline_holds_while_all_threads_are_busy(limited_kb: Stillroom, is_chat: bool) -> None:
    go_on = threading.Event()
    limited_kb.ask("Who ?")

    async def ask_in_a_hurry() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, go_on.wait, 20)
        options = AskOptions(deadline_seconds=0.05)
        try:
            with pytest.raises(DeadlineExceededError):
                await (limited_kb.astreams("Who ?", options) if is_chat else limited_kb.acontinue("Dola", options))
            assert not busy.done()
        finally:
            go_on.set()

    asyncio.run(ask_in_a_hurry())


def test_long_embeddings_and_uploads_do_not_block_other_requests() -> None:
    stillroom, go_on = FakeStillroom(), threading.Event()
    embed, upload = stillroom.embed, stillroom.upload
    stillroom.embed = lambda *given: (go_on.wait(20), embed(*given))[1]  # type: ignore[method-assign]
    stillroom.upload = lambda *given: (go_on.wait(20), upload(*given))[1]  # type: ignore[method-assign]
    document = {"documents": [{"name": "a.md", "text": "a"}]}
    with (
        serving(as_stillroom(stillroom)) as url,
        httpx.Client(base_url=url, timeout=20) as client,
        ThreadPoolExecutor(80) as pool,
    ):
        long = [pool.submit(client.post, "/v1/embeddings", json={"input": "a"}) for _ in range(40)]
        long += [pool.submit(client.post, "/v1/documents", json=document) for _ in range(40)]
        assert client.post("/v1/search", json={"query": "a"}).status_code == 200
        assert client.get("/healthz").json()["documents"] == 1
        assert ask(client).status_code == 200
        assert not any(one.done() for one in long)
        go_on.set()
        assert {one.result().status_code for one in long} == {200}


def test_prompts_are_limited(limited_kb: Stillroom) -> None:
    answer = limited_kb.ask("Which company employed Dola Kenric ?")
    assert answer.reuse.num_prompt_tokens <= 120
    with pytest.raises(PromptTooLongError, match="max_prompt_tokens"):
        limited_kb.ask("Dola Kenric " * 200)
    with pytest.raises(PromptTooLongError, match="max_prompt_tokens"):
        asyncio.run(limited_kb.acontinue("Dola Kenric " * 200))
